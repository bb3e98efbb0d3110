"""A mixture of experts in portable Triton: routing of tokens, and two products by expert."""
