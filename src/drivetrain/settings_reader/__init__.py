"""Reads a task's settings: from the source text of its class (`declaration`), or from the live class (`live`).

Both return the same `Setting` objects, so help, errors and values agree. The command line reads the text, because it must not
import torch; workers read the class.
"""
