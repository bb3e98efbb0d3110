"""The calling conventions of others, on tilewise's kernels: one module for each library."""
