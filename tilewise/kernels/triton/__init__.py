"""Portable kernels, in Triton."""

from tilewise.kernels.host.keys import settle_names

settle_names()
