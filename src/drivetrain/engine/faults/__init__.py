"""Faults of a training and how they are found: out of memory, NaN, a result that depends on the plan, runs that differ."""
