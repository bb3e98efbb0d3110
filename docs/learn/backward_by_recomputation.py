# %% [markdown]
# # Backward by recomputation
#
# The gradient of attention needs the weights P, N x N of them. Storing them costs more memory
# than all else together. They are not stored: each tile of P is computed once more, from q, k and
# one number a row.

# %%
import torch

torch.manual_seed(0)
n, d = 256, 32
q, k, v = (torch.randn(n, d, dtype=torch.float64, requires_grad=True) for _ in range(3))
do = torch.randn(n, d, dtype=torch.float64)  # the gradient of the output, from what follows

s = q @ k.T * d**-0.5
p = s.softmax(dim=1)
o = p @ v
o.backward(do)
print(f"weights that autograd has kept: {p.numel():,} numbers; q, k, v and o: {4 * n * d:,}")

# %% [markdown]
# ## The equations
#
# With lse of each row, P_ij = exp(s_ij - lse_i). Then, by the chain rule,
#
# - dV = P^T dO
# - dP = dO V^T
# - dS = P * (dP - delta), where delta_i = sum_j P_ij dP_ij = rowsum(dO * O)
# - dQ = scale dS K, dK = scale dS^T Q
#
# delta is the one thing that would need a whole row of P. It does not: it is a row sum of dO * O,
# which are there.

# %%
with torch.no_grad():
    lse = s.logsumexp(dim=1)
    delta = (do * o).sum(dim=1)
    torch.testing.assert_close(delta, (p * (do @ v.T)).sum(dim=1))

    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for i in range(0, n, 64):  # a tile of queries
        for j in range(0, n, 64):  # a tile of keys
            rows, columns = slice(i, i + 64), slice(j, j + 64)
            tile = (q[rows] @ k[columns].T * d**-0.5 - lse[rows, None]).exp()  # P, computed again
            ds = tile * (do[rows] @ v[columns].T - delta[rows, None])
            dv[columns] += tile.T @ do[rows]
            dq[rows] += ds @ k[columns] * d**-0.5
            dk[columns] += ds.T @ q[rows] * d**-0.5

for mine, autograds in ((dq, q.grad), (dk, k.grad), (dv, v.grad)):
    torch.testing.assert_close(mine, autograds)

# %% [markdown]
# Five products a tile where a stored P would need four: a quarter more multiplications, and no N
# x N memory. As reading takes longer than multiplying, this is faster, too.
#
# ## Counted
#
# The papers' algorithm, on the memory that counts:

# %%
from tilewise.reference.incremental import flash_backward, flash_forward_2
from tilewise.reference.tiling import Tiling

tiling = Tiling(64, 64)
inputs = [x.detach() for x in (q, k, v)]
forward = flash_forward_2(*inputs, tiling)
backward = flash_backward(do, *inputs, forward.o, forward.xi, tiling)
torch.testing.assert_close(backward.dq, q.grad)
print(f"forward moved {forward.memory.accesses:,} elements, backward {backward.memory.accesses:,}")
print(f"slow memory beside inputs and outputs: {backward.memory.peak_extra} elements")

# %% [markdown]
# ## Who adds to whom
#
# A key's gradient is a sum over queries, a query's a sum over keys. A program that owns a tile of
# keys adds up dK and dV by itself, but adds to dQ of all queries, as others do at the same time:
# in whatever order they come, so that the last bits differ from run to run. `deterministic=True`
# gives these sums one order.
#
# ## The same by the real op

# %%
import tilewise

leaves = [x.detach()[None, :, None].float().requires_grad_() for x in (q, k, v)]
out = tilewise.attention(*leaves, deterministic=True)
out.backward(do[None, :, None].float())
for leaf, autograds in zip(leaves, (q.grad, k.grad, v.grad), strict=True):
    torch.testing.assert_close(leaf.grad[0, :, 0].double(), autograds, atol=1e-5, rtol=1e-5)
print("equal to autograd's gradients of the written-out formula")
