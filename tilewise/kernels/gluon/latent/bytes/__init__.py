"""Attention over 8-bit latents on Hopper."""
