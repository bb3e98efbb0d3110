"""A kernel of the Hugging Face hub, made of this package: `python -m tools.hub_kernel OUT`.

Programs that take kernels from the hub then attend by it without a line of ours:
`attn_implementation="org/tilewise-attention"` of transformers, or `kernels.get_kernel(...)`. The
kernel is pure Python, one build for CPUs and one for CUDA (`torch-cpu`, `torch-cuda`), and holds
the portable and the Hopper kernels with what they stand on.

rewrite.py     the copy: which modules it needs, imports relative to it, a namespace of its own
build.py       the folder as the hub has it: build.toml, card, sources, builds with metadata
"""
