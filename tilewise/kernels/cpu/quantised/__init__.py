"""Products with weights of 8 and 4 bits on a CPU."""
