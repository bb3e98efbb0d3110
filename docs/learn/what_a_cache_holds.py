# %% [markdown]
# # GQA, MLA, and what a cache holds
#
# A model that writes a text looks back at every token before, for each new one. Keys and values
# of those are kept in a cache. How large it is decides how many texts a GPU writes at once, and
# how fast: every step reads all of it.

# %%
import torch

from tilewise.cost import cache_bytes_by_kind

# Sizes as DeepSeek-V3's: 128 query heads, 128 channels each; latents of 512, and 64 that rotate.
print("bytes of one token in one layer, 2 bytes a number")
for kind, size in cache_bytes_by_kind(num_q_heads=128, num_kv_heads=16, head_dim=128).items():
    print(f"  {kind:4} {size:8,.0f}")

# %% [markdown]
# ## Query heads that share a key head (GQA)
#
# Fewer key heads than query heads: head h reads key head h // G. Nothing is copied; the op sees
# it by the shapes.

# %%
import tilewise

torch.manual_seed(0)
q = torch.randn(1, 10, 8, 16)  # 8 query heads
k, v = torch.randn(2, 1, 10, 2, 16)  # 2 key heads: groups of 4
grouped = tilewise.attention(q, k, v, causal=True)
repeated = tilewise.attention(
    q, k.repeat_interleave(4, dim=2), v.repeat_interleave(4, dim=2), causal=True
)
torch.testing.assert_close(grouped, repeated)
print("the cache holds", k.numel() + v.numel(), "numbers in place of", 2 * 4 * k.numel())

# %% [markdown]
# ## One latent for all heads (MLA)
#
# Keys and values of all heads are made from one vector z of a token: k_h = z W_uk,h^T and v_h = z
# W_uv,h^T. Only z is cached. It looks as if every step had to make all keys again from z. It need
# not, since a product can be bracketed the other way:
#
# q . (z W_uk^T) = (q W_uk) . z
#
# Multiply the one query by W_uk, and attend to the latents themselves: one key head of R
# channels, whose values are the same latents. Multiply the result by W_uv. The first way is
# called expanded, the second absorbed.

# %%
heads, rank, rope, nope, width, tokens = 4, 32, 8, 16, 16, 20
z, k_rope = torch.randn(tokens, rank), torch.randn(tokens, rope)  # what is cached of each token
w_uk, w_uv = torch.randn(heads, nope, rank), torch.randn(heads, width, rank)
q_nope, q_rope = torch.randn(1, heads, nope), torch.randn(1, heads, rope)
scale = (nope + rope) ** -0.5

# expanded: the keys and values of every head
keys = torch.cat([torch.einsum("tr,hnr->thn", z, w_uk),
                  k_rope[:, None].expand(-1, heads, -1)], dim=-1)  # fmt: skip
values = torch.einsum("tr,hvr->thv", z, w_uv)
query = torch.cat([q_nope, q_rope], dim=-1)
expanded = tilewise.attention(query[None], keys[None], values[None], softmax_scale=scale)[0]

# absorbed: by hand
q_latent = torch.einsum("thn,hnr->thr", q_nope, w_uk)
scores = (
    torch.einsum("thr,kr->thk", q_latent, z) + torch.einsum("thr,kr->thk", q_rope, k_rope)
) * scale
absorbed = torch.einsum("thk,kr,hvr->thv", scores.softmax(dim=-1), z, w_uv)
torch.testing.assert_close(absorbed, expanded)
print(f"cached a token: {rank + rope} numbers in place of {heads * (nope + rope + width)}")

# %% [markdown]
# Absorbed attention multiplies more for each key (2 R + Dr in place of Dn + Dr + Dv) and expands
# nothing, so it is for few new tokens; prompts are expanded. Where that turns: [latent
# attention](../guide/mla.md).
#
# ## The same by the real op
#
# `mla_decode` reads latents through a block table, as an engine keeps them.

# %%
block_size = 16
cache = torch.zeros(3, block_size, rank + rope)
slots = torch.arange(tokens)  # blocks 0 and 1
tilewise.write_latent_cache(z, k_rope, cache, slots)
o = tilewise.mla_decode(
    q_latent,
    q_rope,
    cache,
    block_table=torch.tensor([[0, 1]], dtype=torch.int32),
    seqlens_k=torch.tensor([tokens], dtype=torch.int32),
    cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
    max_seqlen_q=1,
    softmax_scale=scale,
)
o = torch.einsum("thr,hvr->thv", o, w_uv)
torch.testing.assert_close(o, expanded, atol=1e-4, rtol=1e-4)
print("equal, the largest difference:", (o - expanded).abs().max().item())
