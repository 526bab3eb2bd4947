"""How steps run faster: CUDA graphs, compiled code, parallel kernels, threads, and the trials that choose among them."""
