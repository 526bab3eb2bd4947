"""Hyper-parameter search: trials are ordinary runs, proposed and judged by Optuna, and kept in one folder."""
