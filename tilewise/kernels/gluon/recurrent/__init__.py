"""Hopper's kernels of layers whose memory is a state."""
