"""The paged KV cache. spec and storage know torch; allocator and prefix do not."""
