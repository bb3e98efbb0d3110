"""Attention over paged caches, and filling them, in portable Triton."""
