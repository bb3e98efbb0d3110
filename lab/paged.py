"""Decoding over a paged cache, beside what reads contiguous keys and FA3.

One new token a sequence, D 128 and (table "wide") 512, blocks in random order, calls replayed from
a CUDA graph that goes through so many caches that keys and values come from memory. Bytes are those
of the keys, the values and their scales. A kernel whose result is wrong gets no number. With
TRITON_OVERRIDE_ARCH=sm80 (or sm89) kernels are those of that architecture; see `lab/ampere.py`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from lab.ampere import take_overridden
from tilewise import ops
from tilewise.bench.report import emit, format_table, say
from tilewise.bench.roofline import Ceilings, measure_ceilings
from tilewise.reference.four_bits import pack, unpack

Row = dict[str, Any]
Call = Callable[[int], Tensor]
OURS = ("tilewise", "tilewise, planned")
ROTATED_BYTES = 640 << 20  # of caches in one graph: an order more than the largest L2
GRAPH_CALLS = 8  # at least, in one graph: the replay's own launch is shared among them
REPEATS = 15
TOLERANCE = 1e-2  # of the norm; bfloat16 rounds to 4e-3
CHECKED = 4  # sequences: the longest and the last ones


@dataclass(frozen=True, slots=True)
class Case:
    """A batch that decodes one token a sequence; `asked` is the goal, in TB/s or us."""

    name: str
    lengths: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    asked: str = ""
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128


_MIXED = (*range(200, 290, 3), 131072, *range(200, 350, 5))
CASES = (
    Case("1 x 131,072", (131072,), 32, 8, "3.9 TB/s"),
    Case("16 x 8,192", (8192,) * 16, 32, 8, "4.0 TB/s"),
    Case("64 x 4,096", (4096,) * 64, 32, 8, "4.15 TB/s"),
    Case("128 x 2,048", (2048,) * 128, 64, 8, "4.05 TB/s"),
    Case("16 x 4,096, no groups", (4096,) * 16, 32, 32, "4.2 TB/s"),
    Case("131,072 beside 60 of 200-350", _MIXED, 32, 8, "3.6 TB/s"),
    Case("1 x 1,024", (1024,), 32, 8, "8 us"),
)
WIDE_CASES = tuple(
    Case(f"{rows} x 4,096", (4096,) * rows, group * heads, heads, "85 %", head_dim=512)
    for heads, group in ((1, 8), (1, 16), (4, 8))
    for rows in (1, 32, 64)
)
WIDTH_CASES = (
    Case("32 x 8,192", (8192,) * 32, 16, 2, "85 %", head_dim=256),
    Case("64 x 4,096", (4096,) * 64, 64, 8, "85 %", head_dim=64),
)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTIGUOUS = 4096  # a block that holds a whole sequence


class Inputs:
    """One case on the device, with as many caches as a graph goes through."""

    def __init__(self, case: Case, rotated_bytes: int, where: str = "cuda") -> None:
        self.case = case
        counts = [-(-length // case.block_size) for length in case.lengths]
        channels = 2 * sum(case.lengths) * case.num_kv_heads * case.head_dim
        self.num_bytes = (
            channels // 2 if case.dtype == torch.uint8 else channels * case.dtype.itemsize
        )
        copies = max(1, min(64, -(-rotated_bytes // self.num_bytes)))
        shape = (sum(counts), case.block_size, case.num_kv_heads, case.head_dim)
        drawn = [[_draw(shape, case.dtype, where) for _ in range(2)] for _ in range(copies)]
        self.caches = [[cache for cache, _ in pair] for pair in drawn]
        self.scales = [[scale for _, scale in pair] for pair in drawn]
        if case.dtype.itemsize == 1:
            self.num_bytes += 2 * sum(case.lengths) * case.num_kv_heads * 4
        order = torch.randperm(shape[0], device=where).int()
        self.table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=where)
        for row, (count, piece) in enumerate(zip(counts, order.split(counts), strict=True)):
            self.table[row, :count] = piece
        self.lengths = torch.tensor(case.lengths, dtype=torch.int32, device=where)
        self.cu_seqlens_q = torch.arange(len(counts) + 1, dtype=torch.int32, device=where)
        longest = max(range(len(counts)), key=case.lengths.__getitem__)
        self.checked = sorted({longest, *range(len(counts))[1 - CHECKED :]})
        size = (len(counts), case.num_q_heads, case.head_dim)
        self.q = torch.randn(size, device=where, dtype=torch.bfloat16)

    def contiguous(self, index: int, sequence: int) -> list[Tensor]:
        """The keys and values (N, Hk, D) of a sequence, in what their bytes stand for."""
        blocks = self.table[sequence].long()
        found = []
        for cache, scale in zip(self.caches[index], self.scales[index], strict=True):
            x = cache[blocks].flatten(0, 1)[: self.case.lengths[sequence]]
            if x.dtype == torch.uint8:
                x = unpack(x, scale[blocks].flatten(0, 1)[: len(x)], torch.float64)
            elif scale is not None:
                x = x.double() * scale[blocks].flatten(0, 1)[: len(x), :, None].double()
            found.append(x)
        return found

    def truth(self) -> Tensor:
        """The checked rows in float64, of the first caches."""
        rows = []
        for sequence in self.checked:
            k, v = (x.double().transpose(0, 1) for x in self.contiguous(0, sequence))
            q = self.q[sequence].double().view(k.shape[0], -1, k.shape[2])
            rows.append(F.scaled_dot_product_attention(q, k, v).flatten(0, 1))
        return torch.stack(rows)


def _draw(shape: Sequence[int], dtype: torch.dtype, where: str) -> tuple[Tensor, Tensor | None]:
    x = torch.randn(*shape, device=where, dtype=torch.bfloat16)
    if dtype.itemsize > 1:
        return x.to(dtype), None
    if dtype == torch.uint8:
        return pack(x)
    limit = 127.0 if dtype == torch.int8 else 448.0
    scale = x.abs().amax(-1, keepdim=True).float() / limit
    values = x / scale
    return (values.round() if dtype == torch.int8 else values).to(dtype), scale.squeeze(-1)


def ours(inputs: Inputs, planned: bool = False) -> Call:
    """Paged attention of the package."""
    options: dict[str, Any] = {
        "block_table": inputs.table,
        "seqlens_k": inputs.lengths,
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "max_seqlen_q": 1,
    }
    k_cache, v_cache = inputs.caches[0]
    scales: dict[str, Any] = dict(zip(("k_scale", "v_scale"), inputs.scales[0], strict=True))
    plan = ops.plan_paged_attention(inputs.q, k_cache, v_cache, **scales, **options)
    options["plan"] = plan if planned else None

    def call(index: int) -> Tensor:
        (k, v), (k_scale, v_scale) = inputs.caches[index], inputs.scales[index]
        given = options | {"k_scale": k_scale, "v_scale": v_scale}
        o: Tensor = ops.paged_attention(inputs.q, k, v, **given)
        return o

    return call


def ours_planned(inputs: Inputs) -> Call:
    """The same with a plan made beforehand, as it is once for all layers of a step."""
    return ours(inputs, planned=True)


def sdpa(inputs: Inputs) -> Call | None:
    """Torch's own over contiguous keys, query heads of a group as rows: its fastest form."""
    case = inputs.case
    if len(set(case.lengths)) > 1 or case.dtype != torch.bfloat16:
        return None
    batch = range(len(case.lengths))
    keys = []
    for index in range(len(inputs.caches)):
        pairs = [inputs.contiguous(index, b) for b in batch]
        keys.append([torch.stack(x).transpose(1, 2).contiguous() for x in zip(*pairs, strict=True)])
    q = inputs.q.view(len(batch), case.num_kv_heads, -1, case.head_dim)

    def call(index: int) -> Tensor:
        k, v = keys[index]
        return F.scaled_dot_product_attention(q, k, v).flatten(1, 2)

    return call


def fa3(inputs: Inputs) -> Call | None:
    """FlashAttention-3 over the same blocks, where it can be imported."""
    if inputs.case.dtype != torch.bfloat16:
        return None
    if find_spec("flash_attn_interface") is None:
        return None
    fa: Any = import_module("flash_attn_interface")
    if not hasattr(fa, "fwd"):
        return None
    longest = max(inputs.case.lengths)

    def call(index: int) -> Tensor:
        found = fa.fwd(
            inputs.q, *inputs.caches[index], True, cu_q=inputs.cu_seqlens_q, max_q=1,
            max_k=longest, seqused_k=inputs.lengths, table=inputs.table,
        )  # fmt: skip
        o: Tensor = found[0]
        return o

    return call


def flex(inputs: Inputs) -> Call | None:
    """FlexAttention over contiguous keys; compiled once a shape, which takes a while."""
    case = inputs.case
    if len(set(case.lengths)) > 1 or case.dtype != torch.bfloat16:
        return None
    from torch._dynamo import reset
    from torch.nn.attention.flex_attention import flex_attention

    reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    pairs = [inputs.contiguous(0, b) for b in range(len(case.lengths))]
    k, v = (torch.stack(x).transpose(1, 2).contiguous() for x in zip(*pairs, strict=True))
    copies = [(k.clone(), v.clone()) for _ in inputs.caches]
    q = inputs.q.unsqueeze(2)

    def call(index: int) -> Tensor:
        o: Tensor = compiled(q, *copies[index], enable_gqa=True)
        return o.squeeze(2)

    return call


PEERS: dict[str, Callable[[Inputs], Call | None]] = {
    "tilewise": ours,
    "tilewise, planned": ours_planned,
    "fa3": fa3,
    "sdpa_contiguous": sdpa,
    "flex_contiguous": flex,
}


def _graph(call: Call, count: int, copies: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            call(index % copies)
    return graph


def time_together(graphs: dict[str, torch.cuda.CUDAGraph], calls: int) -> dict[str, list[float]]:
    """Seconds of one of the calls of each graph, measured in turn so that all see one clock."""
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    seconds: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPEATS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds[name].append(begin.elapsed_time(end) / 1e3 / calls)
    return seconds


def measure(
    case: Case,
    peers: Sequence[str],
    ceilings: Ceilings,
    rotated_bytes: int = ROTATED_BYTES,
    where: str = "cuda",
) -> list[Row]:
    """Measure one case; a peer that cannot run it, or is wrong, has a reason for a number.

    A CPU checks results and times nothing.
    """
    inputs = Inputs(case, rotated_bytes, where)
    truth = inputs.truth()
    rows: dict[str, Row] = {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    calls: list[Call] = []  # a graph reads plans and copies that only its call keeps alive
    copies = len(inputs.caches)
    count = max(GRAPH_CALLS, copies)
    for peer in peers:
        row: Row = {
            "case": case.name,
            "peer": peer,
            "heads": f"{case.num_q_heads}/{case.num_kv_heads}",
            "D": case.head_dim,
            "block_size": case.block_size,
            "dtype": str(case.dtype).removeprefix("torch."),
        }
        try:
            call = PEERS[peer](inputs)
            if call is None:
                continue
            calls.append(call)
            got = call(0)[inputs.checked].double()
            error = float((got - truth).norm() / truth.norm())
            rows[peer] = row | {"error": None if error < TOLERANCE else f"wrong by {error:.1e}"}
            if error < TOLERANCE and where == "cuda":
                graphs[peer] = _graph(call, count, copies)
        except Exception as error:  # what a peer refuses is a result here
            rows[peer] = row | {"error": " ".join(f"{type(error).__name__}: {error}".split())[:160]}
    for peer, seconds in (time_together(graphs, count) if graphs else {}).items():
        ordered = sorted(seconds)
        median = statistics.median(ordered)
        quarter = len(ordered) // 4
        rows[peer] |= {
            "us": median * 1e6,
            "spread": (ordered[-1 - quarter] - ordered[quarter]) / median,
            "TB/s": inputs.num_bytes / median / 1e12,
            "% of read": 100 * inputs.num_bytes / median / ceilings.read_bytes,
            "tokens/s": len(case.lengths) / median,
            "asked": case.asked,
        }
    for row in rows.values():
        place = f"{row['case']} D {row['D']} {row['dtype']} {row['block_size']} {row['peer']}"
        say(f"{place}: {row.get('us', 0.0):.4g} us {row['error'] or ''}")
    return list(rows.values())


def cases_of(tables: Sequence[str]) -> list[tuple[str, Case]]:
    """List the cases of "decode", "widths" (D 64, 256), "bytes" (8 bits), "nibbles" (4 bits),
    "wide" (D 512) and "blocks" (block sizes)."""
    found: list[tuple[str, Case]] = []
    if "decode" in tables:
        found += [("decode", case) for case in CASES]
    if "widths" in tables:
        found += [("widths", case) for case in WIDTH_CASES]
    if "bytes" in tables:
        for case in CASES[:-1]:
            for dtype in (torch.float8_e4m3fn, torch.int8):
                found.append(("bytes", replace(case, dtype=dtype, asked="1.7 x bfloat16")))
    if "nibbles" in tables:
        for case in (*CASES[:-1], *WIDTH_CASES, WIDE_CASES[2]):
            found.append(("nibbles", replace(case, dtype=torch.uint8, asked="80 %")))
    if "wide" in tables:
        for case in WIDE_CASES:
            for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int8):
                found.append(("wide", replace(case, dtype=dtype)))
    if "blocks" in tables:
        base = CASES[2]
        for size in (CONTIGUOUS, *BLOCK_SIZES):
            found.append(("blocks", replace(base, block_size=size, asked="")))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="lab/paged.py", description=__doc__)
    tables = ("decode", "widths", "bytes", "nibbles", "wide", "blocks")
    parser.add_argument(
        "--only", nargs="+", choices=tables, default=tables, metavar="TABLE",
        help=f"which tables: {', '.join(tables)}; default: all",
    )  # fmt: skip
    parser.add_argument(
        "--peers", nargs="+", choices=tuple(PEERS), default=tuple(PEERS), metavar="PEER",
        help=f"of {', '.join(map(repr, PEERS))}; default: all",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", default=None, help="also write the results here")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a GPU that torch can see")
    arch = take_overridden()
    torch.manual_seed(0)
    ceilings = measure_ceilings("cuda")
    print(ceilings)
    rows: list[Row] = []
    for table, case in cases_of(options.only):
        peers = options.peers if table == "decode" else [p for p in options.peers if p in OURS]
        rows += [{"table": table} | row for row in measure(case, peers, ceilings)]
        torch.cuda.empty_cache()
    shape = ["table", "case", "heads", "D", "dtype", "block_size", "peer"]
    columns = [*shape, "us", "spread", "TB/s", "% of read", "tokens/s", "asked", "error"]
    print(format_table(rows, columns))
    emit(
        {
            "version": tilewise.__version__,
            "as": f"sm_{arch}" if arch else None,
            "ceilings": ceilings.as_dict(),
            "rows": rows,
        },
        options.json,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
