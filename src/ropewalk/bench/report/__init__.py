"""`ropewalk report`: records of the kernels' benchmarks as one page that needs nothing else."""
