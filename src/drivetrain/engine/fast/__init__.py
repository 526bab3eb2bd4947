"""How steps run faster.

- `tuner`: measures the first steps and chooses; `trial` runs one micro-batch eager, captured and compiled
- `graphs`: CUDA graphs; `parallel_kernels` runs independent kernels of a graph in parallel
- `compiled`: torch.compile of the loss, or of each repeated block (`blocks`); `stem` replaces first convolutions
- `threads`: the number of CPU threads
- `python_state`: reads the Python values that a graph or compiled code assumes constant
- `rehearsal`: restores what a trial changed, and compares results
- `steppers`: take one step, many steps, or a whole epoch by the code of a task family
"""
