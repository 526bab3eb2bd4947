"""Finds the memory and time that a task needs.

`trace.py` finds them from shapes alone, with `fake_kernels.py` in place of GPU kernels, and `survey.py` makes a task's profile
from that trace. `probe.py` measures real steps on a device. `memory.py` reads peak memory and recognises failed allocations.
"""
