"""The host's side of Hopper's kernels: launches, descriptors, calls that are repeated."""
