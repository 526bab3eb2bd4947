"""PPO of small perceptrons by kernels of its own: a whole collection's learning, and for built-in worlds its playing too."""
