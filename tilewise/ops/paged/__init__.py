"""Attention over paged caches, the caches themselves, prefixes and trees that share them."""
