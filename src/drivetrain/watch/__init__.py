"""Observers and readers of runs."""
