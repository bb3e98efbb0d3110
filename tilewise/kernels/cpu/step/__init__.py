"""A model's step on a CPU as one compiled list of operations."""
