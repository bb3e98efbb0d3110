"""The host's side of Hopper's kernels: launches, descriptors, calls that are repeated."""

from tilewise.kernels.host.keys import settle_names

settle_names()
