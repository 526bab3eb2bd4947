"""The memory and time that a task needs.

`trace.py` finds them from shapes alone, with `fake_kernels.py` in place of GPU kernels; `survey.py` makes a task's profile of
it; `probe.py` measures real steps on a device; `memory.py` reads peak memory and recognises failed allocations.
"""
