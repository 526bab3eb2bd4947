"""The worker-side code that executes a plan."""
