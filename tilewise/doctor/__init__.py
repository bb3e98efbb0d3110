"""`tilewise doctor`: what is installed, what this machine can run, and whether it is right here.

packages.py    what the package requires against what is installed; no torch
machine.py     processor, GPU, Triton, and the folders of compiled kernels
backends.py    which backend computes which op here, and why the others do not
selftest.py    short calls of the ops: errors against float64, and speed
report.py      all of it as text to paste into an issue, or as JSON
"""
