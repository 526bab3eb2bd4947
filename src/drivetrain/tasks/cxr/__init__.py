"""Chest X-rays: answers to questions, and CheXpert labels."""
