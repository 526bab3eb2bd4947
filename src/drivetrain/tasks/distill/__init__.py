"""Algorithm distillation: a transformer that learns new tasks in its context.

`envs.py`: environments with many tasks. `collect.py`: PPO on all tasks at once, which records its learning histories.
`histories.py`: the files of histories, and histories of an optimal policy with noise. `layers.py`: a transformer with a KV cache.
`model.py`: the three kinds of context. `play.py`: evaluation in context. `distill.py`: the task. `pictures.py`: curves and episodes.
"""
