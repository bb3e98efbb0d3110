"""A mixture of experts in portable Triton: choices, their order, and two products by expert."""
