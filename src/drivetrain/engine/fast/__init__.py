"""How steps run faster: CUDA graphs, compiled code, threads, and the trials that choose among them."""
