"""The CPU as its kernels see it: vectors, the matrix unit, products, threads."""
