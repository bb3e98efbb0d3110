"""Dense and packed attention on Hopper: which kernels take a call."""
