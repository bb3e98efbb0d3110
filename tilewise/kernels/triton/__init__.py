"""Portable kernels, in Triton."""

from tilewise.kernels.host.first_run import first_run
from tilewise.kernels.host.keys import settle_names

settle_names()
first_run()
