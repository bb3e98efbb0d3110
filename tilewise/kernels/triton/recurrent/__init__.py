"""Layers whose memory is a state, in portable kernels."""
