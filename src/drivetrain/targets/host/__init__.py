"""A machine that is reached with commands, and the program that answers requests there."""
