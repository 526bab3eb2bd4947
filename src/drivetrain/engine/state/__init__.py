"""Saves and restores the state of a training.

- `tensors`: reads a training's state as named tensors and JSON, and loads it
- `checkpoint`: writes, publishes and verifies a checkpoint
- `shards`: writes and reads a checkpoint's tensors with torch.distributed.checkpoint
- `resume`: chooses what a checkpoint holds, and resumes a training from it
- `best`: remembers the best evaluation of a run
"""
