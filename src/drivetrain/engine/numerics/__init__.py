"""Reads losses and metrics, and makes optimizers, learning rates and number formats."""
