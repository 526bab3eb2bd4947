"""The container image: its build, its record, what goes wrong in a build."""
