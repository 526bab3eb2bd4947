"""Reinforcement learning: PPO on environments that are tensor functions."""
