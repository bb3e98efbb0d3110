"""Attention over a paged cache of latents on Hopper."""
