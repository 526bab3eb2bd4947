"""What can go wrong in a training, and how it is found: memory, NaN, dependence on the plan."""
