"""Docker or podman: its command line, its API, the target."""
