"""What kernels of several subjects are made of on Hopper."""
