"""Layers whose memory is a state: gated delta, Mamba-2 and causal convolutions."""
