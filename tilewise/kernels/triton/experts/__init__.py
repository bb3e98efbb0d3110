"""A mixture of experts in portable Triton: who computes a token, and two products by expert."""
