"""Finds what goes wrong in a training.

- `out_of_memory`: tells all ranks of one rank's error, and undoes the step
- `nonfinite`: names the module that a NaN comes from
- `dependence`: reports results that depend on the plan; `snapshot` restores what this check changed
- `fingerprint`: shows where two trainings differ
- `injection`: injects faults for tests
"""
