"""Dense and packed attention in portable Triton."""
