"""Gives each step its data.

`feed.py` is the interface of a feed. There are three feeds: `tensor_feed.py` (Tensors), `source_feed.py` (on-policy
samples of a Source) and `loader_feed.py` (map-style data sets, read in `loader_workers.py`). `make_feed.py` chooses one.
`keyed_random.py` draws random numbers that do not depend on ranks, `signature.py` detects changed data, and `batches.py`
moves batches between devices.
"""
