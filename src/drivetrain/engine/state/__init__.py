"""The saved state of a training.

- `tensors`: a training's state as named tensors and JSON
- `checkpoint`: writes, publishes and verifies a checkpoint
- `shards`: the files of a checkpoint's tensors, by torch.distributed.checkpoint
- `resume`: what a checkpoint holds of a training, and how a training goes on from one
- `best`: the best evaluation of a run
"""
