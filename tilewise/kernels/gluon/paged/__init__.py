"""Attention over paged 8-bit caches on Hopper."""
