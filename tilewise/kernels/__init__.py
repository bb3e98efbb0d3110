"""How each op is computed, one folder a backend; knows tensors, not users."""
