# %% [markdown]
# # Tiles, and why memory traffic decides
#
# A GPU multiplies far faster than it reads: an H200 does some 750 million million operations a
# second (bfloat16) and reads 4.4 million million bytes. So it pays to read a number once and to
# use it often. `tilewise.reference` runs the papers' algorithms on a machine that counts every
# element that moves between its slow, large memory (HBM) and its fast, small one (SRAM).

# %%
import torch

from tilewise.reference.incremental import flash_forward_2, standard_forward
from tilewise.reference.tiling import Tiling

torch.manual_seed(0)
n, d = 512, 64
q, k, v = torch.randn(3, n, d, dtype=torch.float64)

# %% [markdown]
# ## The plain way
#
# Three steps that meet in memory: write all scores, read them and write the weights, read the
# weights. The scores are N x N, and travel four times.

# %%
o, memory = standard_forward(q, k, v)
print(f"moved {memory.accesses:,} elements, most beside inputs and outputs {memory.peak_extra:,}")
print(f"the formula 4 N d + 4 N^2 gives {4 * n * d + 4 * n * n:,}")

# %% [markdown]
# ## In tiles
#
# Take 64 rows of queries, walk over the keys 64 at a time, keep m, l and the output in fast
# memory (the notebook before this one). Scores of a tile are used where they are made, and never
# travel. Small tiles read keys so often that little is gained:

# %%
for tile in (32, 64, 128, 256):
    result = flash_forward_2(q, k, v, Tiling(tile, tile))
    torch.testing.assert_close(result.o, o)
    moved = result.memory.accesses
    print(
        f"tiles of {tile:3}: moved {moved:10,} elements, {memory.accesses / moved:4.1f} times less,"
        f" fast memory {result.memory.peak_sram:7,}, slow memory beside {result.memory.peak_extra}"
    )

# %% [markdown]
# Larger tiles read keys less often, until fast memory is full: a tile of queries needs its q, its
# output and one tile of keys, values and scores. Additional slow memory is one number a row,
# whatever N is. That is FlashAttention.
#
# ## Tiles that are not needed
#
# A causal mask hides all keys of some tiles. They are skipped: no read, no product.


# %%
def causal(i, j):
    return j <= i


layout = torch.ones(n // 64, n // 64, dtype=torch.bool).tril()
full = flash_forward_2(q, k, v, Tiling(64, 64))
half = flash_forward_2(q, k, v, Tiling(64, 64, layout=layout, mask=causal))
print(f"all tiles {full.memory.loads:,} elements read, causal {half.memory.loads:,}")

# %% [markdown]
# ## What decides, reading or multiplying?
#
# One query tile of M rows makes 4 M N d operations from 2 N d numbers of two bytes: M operations
# a byte. Where a machine does R operations in the time of reading a byte, M of more than R is
# enough. On an H200 R is some 170, which is why its kernels have tiles of 128 or 192 rows, and
# two that share what they read through the L2 cache.
#
# Decoding has one query a sequence: M is the number of query heads that share a key head. There
# reading decides, always.
#
# ## The same by the real op
#
# `explain` tells bytes, operations and the tiles that a call would use.

# %%
import tilewise

as_op = [x[None, :, None].float() for x in (q, k, v)]  # (batch, tokens, heads, head dim)
o = tilewise.attention(*as_op, causal=True)
torch.testing.assert_close(o[0, :, 0].double(), half.o, atol=1e-5, rtol=1e-5)
print(tilewise.explain("attention", *as_op, causal=True))
