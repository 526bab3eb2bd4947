"""PPO of small perceptrons with CUDA kernels of its own, for learning and, where possible, for collecting."""
