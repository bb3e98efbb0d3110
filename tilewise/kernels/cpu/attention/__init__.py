"""Dense and packed attention on a CPU."""
