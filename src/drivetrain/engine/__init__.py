"""The worker-side code that executes a plan.

The flow of a training, in the order in which it happens:

setup, model   what stays the same: process settings, model, data, precision
execution      the strategy, the step and its tuner under the present plan; a smaller plan after out of memory
loop           the training loop; `cadence` decides what is due after each step
epochs         makes an epoch's samples ready and chooses the stepper (fast/steppers)
step           one optimizer step; `objective` turns losses into gradients of the global mean, and into metrics
evaluate       every sample once; `evaluation`: between the steps of a training
saving         checkpoints; `finish`: the final weights; `inference`: a finished run's model

The subpackages: data, numerics (losses, optimizers, number formats), strategies (single, DDP, FSDP2, DeepSpeed), group (collectives),
fast (CUDA graphs, compiled code), state (checkpoints), log (metrics), measure (memory and time for the plan), faults.
"""
