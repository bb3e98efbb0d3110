"""The CPU's hardware for kernels: vectors, the matrix unit, products, threads."""
