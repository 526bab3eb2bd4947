"""What a step takes: the order of samples, feeds, loader workers and keyed randomness."""
