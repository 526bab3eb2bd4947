"""The synthetic twin: generated studies in the layout of the real data sets."""
