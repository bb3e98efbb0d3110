"""Layers whose memory is a state, on a CPU."""
