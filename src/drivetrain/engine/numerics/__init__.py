"""Losses, metrics, optimizers, learning rates and number formats."""
