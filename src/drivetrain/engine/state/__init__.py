"""What is saved of a training: tensors and JSON, checkpoints, the best evaluation."""
