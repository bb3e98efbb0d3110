"""Attention over paged caches, and filling them, on a CPU."""
