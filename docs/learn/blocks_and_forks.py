# %% [markdown]
# # Blocks, tables, forks
#
# A cache in one piece a text must be as long as the text may get, and the room that it does not
# use is lost. In blocks of a few tokens it grows as it is needed, from anywhere, and two texts
# with one beginning can share its blocks. Here a pool of twelve blocks of four tokens, drawn
# after every step.

# %%
import torch

from tilewise.cache.allocator import BlockAllocator

BLOCK, COLOURS = 4, {"A": "#1f6feb", "B": "#d9730d", "C": "#1a7f37"}
allocator = BlockAllocator(12)
tables, lengths = {}, {}


class Picture:
    """The pool: a cell for each token, coloured by the texts that hold its block."""

    def _repr_svg_(self):
        cells = []
        for block in range(allocator.num_blocks):
            owners = [name for name, table in tables.items() if block in table]
            for offset in range(BLOCK):
                x, y = 10 + (block % 6) * 92 + offset * 20, 8 + block // 6 * 46
                filled = [n for n in owners if tables[n].index(block) * BLOCK + offset < lengths[n]]
                fill = COLOURS[filled[offset % len(filled)]] if filled else "#ffffff"
                edge = COLOURS[owners[0]] if owners else "#b0b7be"
                cells.append(
                    f'<rect x="{x}" y="{y}" width="17" height="17" fill="{fill}" stroke="{edge}"/>'
                )
            label = f"{block}" + (f": {' and '.join(owners)}" if owners else "")
            cells.append(f'<text x="{x - 60}" y="{y + 32}" font-size="12">{label}</text>')
        size = 'viewBox="0 0 570 104" width="570" font-family="sans-serif"'
        what = f'role="img" aria-label="{self}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {what}>{"".join(cells)}</svg>'

    def __str__(self):
        parts = [f"{n} holds blocks {tables[n]} with {lengths[n]} tokens" for n in tables]
        return "; ".join(parts) or "all blocks are free"


def grow(name, tokens):
    """Make room for more tokens of a text."""
    lengths[name] = lengths.get(name, 0) + tokens
    missing = -(-lengths[name] // BLOCK) - len(tables.setdefault(name, []))
    tables[name] += allocator.allocate(missing)


grow("A", 10)
grow("B", 3)
Picture()

# %% [markdown]
# A's ten tokens took three blocks; half of the third is free, and that is all that is ever lost.
# B has one. They grow:

# %%
grow("A", 3)
grow("B", 2)
Picture()

# %% [markdown]
# ## A fork shares, and copies when it writes
#
# Two samples of one prompt begin alike. C is forked from A: it gets A's table, and each block
# counts one owner more. Whole blocks are never written again. A block that both would write to is
# copied first, for the one that writes.

# %%
tables["C"], lengths["C"] = list(tables["A"]), lengths["A"]
allocator.share(tables["C"])
print("owners of A's blocks:", [allocator.ref_count(block) for block in tables["A"]])
Picture()

# %%
copies = []


def before_writing(name):
    """Give a text a last block of its own, if others hold it, too."""
    last = lengths[name] // BLOCK
    if last < len(tables[name]) and allocator.ref_count(tables[name][last]) > 1:
        [own] = allocator.allocate(1)
        copies.append((tables[name][last], own))
        allocator.release([tables[name][last]])
        tables[name][last] = own


before_writing("C")
grow("C", 2)
print("blocks to copy, source and target:", copies)
Picture()

# %% [markdown]
# A's end frees what nobody else holds:

# %%
table_of_a, length_of_a = tables.pop("A"), lengths.pop("A")
allocator.release(table_of_a)
print("free blocks:", allocator.num_free)
allocator.check_integrity()
Picture()

# %% [markdown]
# ## The same by the real op
#
# Keys and values of C lie in A's blocks and in its own. `paged_attention` reads them through the
# table, and gives what attention over C's tokens in one piece gives.

# %%
import tilewise

torch.manual_seed(0)
heads, dim = 2, 16
k, v = torch.randn(2, lengths["C"], heads, dim)  # keys and values of C's tokens
k_cache, v_cache = torch.full(
    (2, 12, BLOCK, heads, dim), float("nan")
).unbind()  # free slots hold NaN


def slots(table, positions):
    return torch.tensor(table)[positions // BLOCK] * BLOCK + positions % BLOCK


begin = torch.arange(length_of_a)
tilewise.write_kv_cache(k[begin], v[begin], k_cache, v_cache, slots(table_of_a, begin))  # by A
tilewise.copy_blocks(k_cache, v_cache, torch.tensor(copies))
rest = torch.arange(length_of_a, lengths["C"])
tilewise.write_kv_cache(k[rest], v[rest], k_cache, v_cache, slots(tables["C"], rest))  # by C

q = torch.randn(1, 4, dim)  # a new query of C, 4 heads on 2
o = tilewise.paged_attention(
    q,
    k_cache,
    v_cache,
    block_table=torch.tensor([tables["C"]], dtype=torch.int32),
    seqlens_k=torch.tensor([lengths["C"]], dtype=torch.int32),
    cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
    max_seqlen_q=1,
)
whole = tilewise.attention(q[None], k[None], v[None])[0]
torch.testing.assert_close(o, whole)
print("equal, the largest difference:", (o - whole).abs().max().item())
