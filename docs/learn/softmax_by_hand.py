# %% [markdown]
# # Softmax by hand
#
# Attention is a weighted mean. A query asks, keys answer with a score each, the softmax makes the
# scores weights that are positive and add up to 1, and the output is the mean of the values by
# these weights. Here one query, four keys, every step written out.

# %%
import torch

torch.manual_seed(0)
q = torch.tensor([1.0, 2.0])  # one query, two channels
k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 0.0]])  # four keys
v = torch.tensor([[10.0], [20.0], [30.0], [40.0]])  # four values of one channel

scores = k @ q * 2**-0.5  # softmax_scale: D ** -0.5, so that scores do not grow with D
scores

# %% [markdown]
# ## From scores to weights
#
# The exponential makes every score positive, and keeps their order; dividing by the sum makes
# them weights.

# %%
weights = scores.exp() / scores.exp().sum()
print(weights, weights.sum())
print("output:", weights @ v)

# %% [markdown]
# ## Why the largest score is subtracted
#
# exp(89) is more than float32 can hold. A constant that is taken from every score cancels in the
# quotient, so take the largest: then the largest exponential is exp(0) = 1.

# %%
large = scores + 100
print("written out:      ", large.exp() / large.exp().sum())
shifted = (large - large.max()).exp()
print("less the largest: ", shifted / shifted.sum())

# %% [markdown]
# ## Who may be seen
#
# A token of a text must not see what comes after it. Its score becomes -inf, whose exponential is
# 0: the key has no weight, and the others share what it would have had. This is the causal mask,
# for all queries of a text at once:

# %%
n, d = 5, 4
q, k, v = torch.randn(3, n, d)
scores = q @ k.T * d**-0.5
hidden = torch.ones(n, n, dtype=torch.bool).triu(1)  # key j > query i
scores = scores.masked_fill(hidden, float("-inf"))
weights = (scores - scores.amax(dim=1, keepdim=True)).exp()
weights = weights / weights.sum(dim=1, keepdim=True)
print(weights.round(decimals=2))

# %% [markdown]
# ## One number a row is enough to remember
#
# The logarithm of a row's sum of exponentials, `lse`, has the largest score and the sum in one
# number. Any weight comes back from its score: exp(s - lse). The backward pass needs no more of a
# row, and neither does merging two parts.

# %%
lse = scores.logsumexp(dim=1)
print((scores - lse[:, None]).exp().round(decimals=2))

# %% [markdown]
# ## The same by the real op
#
# `tilewise.attention` takes (batch, tokens, heads, head dim).

# %%
import tilewise

o, real_lse = tilewise.attention(
    q[None, :, None], k[None, :, None], v[None, :, None], causal=True, return_lse=True
)
torch.testing.assert_close(o[0, :, 0], weights @ v)
torch.testing.assert_close(real_lse[0, 0], lse)
print("equal, the largest difference:", (o[0, :, 0] - weights @ v).abs().max().item())
