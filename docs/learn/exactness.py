# %% [markdown]
# # Exactness
#
# Numbers of a computer are rounded, so that (a + b) + c is not a + (b + c). What, then, may be
# promised of attention? Three things: how far a result is from the truth, that it comes again to
# the bit, and that it does not depend on who else is in the batch.

# %%
import torch

a, b, c = torch.tensor([1e8, -1e8, 1.0])
print("(a + b) + c =", ((a + b) + c).item(), "   a + (b + c) =", (a + (b + c)).item())

torch.manual_seed(0)
x = torch.randn(1 << 16)
print(
    "one sum, three orders:",
    [float(s) for s in (x.sum(), x.flip(0).sum(), x.view(256, -1).sum(0).sum())],
)

# %% [markdown]
# ## How far from the truth
#
# The truth is the same call in float64 from the same rounded inputs. An error has no meaning by
# itself, so it is compared with that of the formula written out in the same dtype: at most twice
# as much is the rule of all tests of this package.

# %%
import tilewise

q, k, v = torch.randn(3, 1, 300, 4, 64).bfloat16()
wide = [x.double() for x in (q, k, v)]
truth = tilewise.attention(*wide, causal=True, backend="reference")


def written_out(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
    return (s.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v).transpose(1, 2)


o = tilewise.attention(q, k, v, causal=True)
ours, eager = ((y.double() - truth).abs().max().item() for y in (o, written_out(q, k, v)))
print(f"largest error in bfloat16: tilewise {ours:.5f}, written out {eager:.5f}")
assert ours <= 2 * eager + 1e-3

# %% [markdown]
# ## The same bits again
#
# A sum has one order here, whatever threads there are: a second call gives the same bits, forward
# and backward.


# %%
def run():
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = tilewise.attention(*leaves, causal=True, deterministic=True)
    out.float().square().sum().backward()
    return [out, *(leaf.grad for leaf in leaves)]


assert all(torch.equal(first, second) for first, second in zip(run(), run(), strict=True))
print("o, dq, dk and dv: the same bits twice")

# %% [markdown]
# ## Whoever else is there
#
# A library picks another order of sums for another size of batch: a row of a product alone, and
# the same row among 64 others, may differ in their last bits. In a model that writes text these
# bits decide a tie now and then, and a different word follows. Torch's product on this machine:

# %%
weight, rows = torch.randn(1024, 1024), torch.randn(64, 1024)
alone, among = rows[:1] @ weight, (rows @ weight)[:1]
print("a row alone and among 64:", "the same bits" if torch.equal(alone, among) else "other bits")

# %% [markdown]
# tilewise has one order for a row, whatever stands beside it. A sequence alone, and among others,
# over a paged cache:

# %%
blocks, block_size = 40, 16
k_cache, v_cache = torch.randn(2, blocks, block_size, 2, 64).unbind()
queries = torch.randn(4, 8, 64)
table = torch.arange(40, dtype=torch.int32).view(4, 10)
lengths = torch.tensor([150, 7, 33, 160], dtype=torch.int32)


def decode(which):
    count = len(which)
    return tilewise.paged_attention(
        queries[which], k_cache, v_cache, block_table=table[which], seqlens_k=lengths[which],
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32), max_seqlen_q=1,
        batch_invariant=True,
    )  # fmt: skip


among = decode([0, 1, 2, 3])
for number in range(4):
    assert torch.equal(decode([number])[0], among[number])
print("each of four sequences: the same bits alone and among the others")

# %% [markdown]
# ## The same by the real op
#
# The paged call gives what the plain one gives, within the rounding of float32:

# %%
keys, values = (cache.view(4, 160, 2, 64)[0:1, :150] for cache in (k_cache, v_cache))
whole = tilewise.attention(queries[0:1, None], keys, values)
torch.testing.assert_close(among[0], whole[0, 0])
print("equal, the largest difference:", (among[0] - whole[0, 0]).abs().max().item())
