"""Machines of any cloud that the user's SkyPilot can start: it brings them up, then they are machines behind SSH."""
