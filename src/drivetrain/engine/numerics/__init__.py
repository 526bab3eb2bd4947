"""Losses, metrics, optimizers and number formats, as a task states them."""
