"""The benchmark of context parallelism: a sequence on several GPUs, against the same one on each of them."""
