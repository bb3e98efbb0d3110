"""Attention over a paged cache of latents in portable Triton."""
