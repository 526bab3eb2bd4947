"""Reinforcement learning: worlds as tensor functions, and PPO over them."""
