"""Tests of fault tolerance: trainings with injected faults or lost hosts, compared with trainings without."""
