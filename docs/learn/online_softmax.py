# %% [markdown]
# # Online softmax
#
# The softmax seems to need all scores of a row at once: the largest to subtract, the sum to
# divide by. It does not. Scores can come one part after the other, and nothing of a part needs to
# be kept.

# %%
import torch

torch.manual_seed(0)
n, d = 12, 4
q, k, v = torch.randn(1, d), torch.randn(n, d), torch.randn(n, d)
scores = (q @ k.T * d**-0.5)[0]  # one row
truth = scores.softmax(dim=0) @ v

# %% [markdown]
# ## Three numbers that go on
#
# After some keys a row keeps `m`, the largest score so far; `l`, the sum of exp(s - m); and
# `acc`, the sum of exp(s - m) v. A new part may bring a larger maximum: then what was summed
# before is multiplied by exp(m - m_new), once.

# %%
m, l, acc = torch.tensor(float("-inf")), torch.tensor(0.0), torch.zeros(d)
for part in range(0, n, 4):
    s, v_part = scores[part : part + 4], v[part : part + 4]
    m_new = torch.maximum(m, s.max())
    shrink = (m - m_new).exp()  # 0 for the first part: exp(-inf)
    p = (s - m_new).exp()
    l = shrink * l + p.sum()
    acc = shrink * acc + p @ v_part
    m = m_new
    print(f"after {part + 4:2} keys: m {m:.3f}, l {l:.3f}, acc / l {(acc / l)[:2].tolist()}")

torch.testing.assert_close(acc / l, truth)

# %% [markdown]
# Division comes once, at the end. The order of the parts does not matter, but for rounding.
#
# ## Parts that never meet
#
# Two halves of the keys may be computed by two programs, or on two GPUs, at the same time. Each
# hands over its output and its lse = m + log l, and they are merged by weight: w = exp(lse_part -
# lse).


# %%
def attend(part):
    s = scores[part]
    return s.softmax(dim=0) @ v[part], s.logsumexp(dim=0)


(o_a, lse_a), (o_b, lse_b) = attend(slice(0, 5)), attend(slice(5, n))
lse = torch.logaddexp(lse_a, lse_b)
merged = (lse_a - lse).exp() * o_a + (lse_b - lse).exp() * o_b
torch.testing.assert_close(merged, truth)
print("weights of the two parts:", (lse_a - lse).exp().item(), (lse_b - lse).exp().item())

# %% [markdown]
# Splitting keys for one long sequence, rings of GPUs, prefixes that sequences share: all are this
# merge.
#
# ## The same by the real op
#
# The op gives o and lse; `merge_states` merges two parts.

# %%
import tilewise


def call(part):
    return tilewise.attention(q[None, :, None], k[None, part, None], v[None, part, None],
                              return_lse=True)  # fmt: skip


(o_a, lse_a), (o_b, lse_b) = call(slice(0, 5)), call(slice(5, n))
o, lse = tilewise.merge_states(o_a[0], lse_a[0], o_b[0], lse_b[0])
torch.testing.assert_close(o[0, 0], truth)
torch.testing.assert_close(lse[0, 0], scores.logsumexp(dim=0))
print("equal, the largest difference:", (o[0, 0] - truth).abs().max().item())
