"""The settings of PPO that may differ between the trials of a population without changing its program."""

PER_TRIAL = ("gamma", "gae", "ratio_clip", "value_clip", "value_weight", "entropy_weight")
"""Settings that the loss and the collection use: in a population each is a tensor, one value for each trial."""
