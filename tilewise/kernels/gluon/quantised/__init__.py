"""Products with weights of 8 and 4 bits, by mma.sync: every NVIDIA GPU from compute capability 8.0
on."""
