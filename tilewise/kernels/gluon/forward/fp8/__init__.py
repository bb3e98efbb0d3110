"""The forward pass over e4m3 tensors on Hopper."""
