"""What a task asks of a machine: traced without one, or measured on one."""
