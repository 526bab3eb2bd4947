"""A Slurm cluster: its script, its states, the target."""
