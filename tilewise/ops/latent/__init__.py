"""Latent attention (MLA): absorbed over a cache of latents, and expanded."""
