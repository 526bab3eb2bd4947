"""The data of a step.

`feed.py` says what the step asks of its data. Three feeds answer: `tensor_feed.py` (Tensors), `source_feed.py` (on-policy
samples of a Source) and `loader_feed.py` (map-style data sets, read in `loader_workers.py`). `make_feed.py` chooses one.
`keyed_random.py` gives random numbers that do not depend on ranks, `signature.py` detects changed data, and `batches.py`
moves batches between devices.
"""
