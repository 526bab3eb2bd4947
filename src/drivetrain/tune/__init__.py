"""Hyper-parameter search with Optuna: trials are ordinary runs in one folder."""
