"""What can go wrong in a training, and how it is found.

out_of_memory: errors that all ranks learn of; nonfinite: the module that a NaN comes from; dependence: results that depend on the
plan (snapshot restores what that check changed); fingerprint: where two trainings differ; injection: faults on purpose.
"""
