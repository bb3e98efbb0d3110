"""The operations between the products of a model's step, in portable Triton."""
