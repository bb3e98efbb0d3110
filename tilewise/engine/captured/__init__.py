"""Steps whose batch lives on the device, captured as CUDA graphs."""
