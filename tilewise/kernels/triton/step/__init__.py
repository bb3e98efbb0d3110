"""What lies between the products of a model's step, in portable Triton."""
