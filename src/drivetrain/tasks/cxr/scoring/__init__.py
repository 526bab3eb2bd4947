"""Evaluation: metrics, tables, answers in words, and pictures."""
