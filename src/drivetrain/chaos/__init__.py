"""Experiments on robustness: trainings with injected faults or lost hosts, compared with undisturbed ones."""
