"""How steps run faster.

tuner measures the first steps and chooses; trial runs one micro-batch in each way. graphs: CUDA graphs; compiled: torch.compile of
the loss, by block where a model has repeated blocks (blocks); stem, parallel_kernels: custom passes and kernels side by side;
threads: of a CPU. python_state finds what a graph must not take as fixed; rehearsal restores what a trial changed.
steppers: many quiet steps, or whole epochs by a family's own code.
"""
