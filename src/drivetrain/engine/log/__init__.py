"""Turns metrics on the device into logged rows.

- `slots`: the names of metrics and their positions in a row
- `ring`: the rows of the last steps on the device
- `rows`: the rows of metrics.jsonl
- `observe`: the observers that receive rows, notices and observation points
- `deviceclock`: where a GPU's time goes in a step
"""
