"""The attention backends of vLLM: their form is vLLM's, and steps give what the formulas say.

vLLM's interface is recorded (`vllm_recorded.py`), so the everyday run needs no vLLM; where it can
be imported the slow tests compare the record with it.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.integrations import vllm_recorded
from tests.integrations.vllm_recorded import RECORDS
from tilewise.errors import UnsupportedError
from tilewise.integrations import vllm as plugin
from tilewise.nn.context import StepPlans
from tilewise.reference import mla, paged

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 16


@pytest.fixture
def registered(monkeypatch):
    return vllm_recorded.install(monkeypatch)


@pytest.fixture
def backend(registered):
    return importlib.import_module("tilewise.integrations.vllm.paged")


@pytest.fixture
def latent(registered):
    return importlib.import_module("tilewise.integrations.vllm.latent")


def step(queries, lengths, *, padded=0, shared_blocks=0):
    """The metadata of a step of vLLM's, whose sequences own blocks in no order."""
    common = sys.modules["vllm.v1.attention.backend"].CommonAttentionMetadata
    counts = [-(-length // BLOCK) for length in lengths]
    blocks = torch.randperm(sum(counts) + 4, generator=torch.Generator().manual_seed(0)).tolist()
    table = torch.full((len(lengths) + padded, max(counts)), 0, dtype=torch.int32)
    first = [blocks.pop() for _ in range(shared_blocks)]
    slots = []
    for row, (count, length, new) in enumerate(zip(counts, lengths, queries, strict=True)):
        for column in range(count):
            table[row, column] = first[column] if column < shared_blocks else blocks.pop()
        at = torch.arange(length - new, length)
        slots.append(table[row, at // BLOCK].long() * BLOCK + at % BLOCK)
    edges = torch.tensor([0, *queries, *[0] * padded]).cumsum(0).int()
    seq_lens = torch.tensor([*lengths, *[0] * padded], dtype=torch.int32)
    return common(
        query_start_loc=edges, query_start_loc_cpu=edges, seq_lens=seq_lens,
        num_reqs=len(lengths) + padded, num_actual_tokens=sum(queries),
        max_query_len=max(queries), max_seq_len=max(lengths), block_table_tensor=table,
        slot_mapping=torch.cat(slots), causal=True,
    )  # fmt: skip


def built(backend, common, prefix=0):
    spec = SimpleNamespace(block_size=BLOCK)
    builder = backend.PagedBuilder(spec, ["layer"], SimpleNamespace(), torch.device("cpu"))
    return builder.build(prefix, common)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(backend, common, *, heads=(4, 2), dim=32, prefix=0, dtype="auto", cache=None, **options):
    """One layer over a cache of drawn numbers; returns o, the inputs and the cache."""
    total = int(common.query_start_loc[-1])
    q, k, v = (drawn(total, n, dim, seed=i) for i, n in enumerate((heads[0], heads[1], heads[1])))
    shape = backend.PagedBackend.get_kv_cache_shape(64, BLOCK, heads[1], dim)
    if cache is None:
        cache = drawn(*shape, seed=9)
    layer = backend.PagedImpl(heads[0], dim, dim**-0.5, heads[1], kv_cache_dtype=dtype, **options)
    scales = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25))
    output = torch.full((total, heads[0] * dim), float("nan"))
    o = layer.forward(scales, q, k, v, cache, built(backend, common, prefix), output)
    assert o is output
    return o.view(total, heads[0], dim), (q, k, v), cache


def truth(common, q, cache, **options):
    k_cache, v_cache = cache.unbind(1)
    return paged.paged_attention(
        q, k_cache, v_cache, block_table=common.block_table_tensor, seqlens_k=common.seq_lens,
        cu_seqlens_q=common.query_start_loc, **options,
    )  # fmt: skip


@pytest.mark.parametrize("version", RECORDS)
def test_every_method_takes_what_vllm_gives_it(backend, latent, version):
    classes = {
        "AttentionBackend": (backend.PagedBackend, latent.LatentBackend),
        "AttentionImpl": (backend.PagedImpl,),
        "AttentionMetadataBuilder": (backend.PagedBuilder,),
        "MLAAttentionImpl": (latent.LatentImpl,),
    }
    seen = 0
    for name, ours in classes.items():
        for method, wanted in RECORDS[version][name].items():
            for one in ours:
                if method not in vars(one):
                    continue
                given = [*inspect.signature(getattr(one, method)).parameters]
                given = [p for p in given if p not in ("self", "cls", "sinks", "mla_args")]
                if name == "MLAAttentionImpl" and method == "__init__":
                    wanted = wanted[: len(given)]  # the rest is the common class's
                assert given == wanted, f"{one.__name__}.{method}"
                seen += 1
    assert seen > 15
    fields = {*RECORDS[version]["CommonAttentionMetadata"]}
    read = re.findall(r"\bcommon\.(\w+)", inspect.getsource(backend.PagedBuilder))
    assert len(read) > 5
    assert fields >= {*read}


OPTIONS = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 9}, {"window": 9}),
    "softcap": ({"logits_soft_cap": 5.0}, {"softcap": 5.0}),
    "slopes": ({"alibi_slopes": [0.1, 0.2, 0.3, 0.4]},
               {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}),
    "sinks": ({"sinks": torch.tensor([0.5, 0.0, -1.0, 2.0])},
              {"sinks": torch.tensor([0.5, 0.0, -1.0, 2.0])}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_prompts_and_decode_rows_of_one_step_are_right(backend, name):
    common = step([20, 1, 7], [20, 37, 50])
    ours, theirs = OPTIONS[name]
    o, (q, k, v), cache = run(backend, common, **ours)
    torch.testing.assert_close(o, truth(common, q, cache, **theirs), atol=1e-5, rtol=0)
    written = cache.transpose(0, 1).flatten(1, 2)[:, common.slot_mapping]
    assert torch.equal(written, torch.stack([k, v]))


def test_an_8_bit_cache_has_the_scales_of_the_layer(backend):
    common = step([3, 1], [30, 17])
    shape = backend.PagedBackend.get_kv_cache_shape(64, BLOCK, 2, 32)
    cache = drawn(*shape).to(torch.float8_e4m3fn).view(torch.uint8)
    o, (q, _, _), cache = run(backend, common, dtype="fp8", cache=cache)
    wide = cache.view(torch.float8_e4m3fn).float()
    wide[:, 0] *= 0.5
    wide[:, 1] *= 0.25
    torch.testing.assert_close(o, truth(common, q, wide), atol=1e-3, rtol=1e-2)


def test_a_cache_may_have_a_heads_keys_beside_its_values(backend):
    """The form of caches since vLLM 0.33: (num_blocks, Hk, block_size, 2 D)."""
    common = step([20, 1, 7], [20, 37, 50])
    cache = drawn(64, BLOCK, 2, 64, seed=9).transpose(1, 2)
    o, (q, k, v), cache = run(backend, common, cache=cache)
    halves = torch.stack(cache.transpose(1, 2).split(32, dim=-1), dim=1)
    torch.testing.assert_close(o, truth(common, q, halves), atol=1e-5, rtol=0)
    written = halves.transpose(0, 1).flatten(1, 2)[:, common.slot_mapping]
    assert torch.equal(written, torch.stack([k, v]))


def test_rows_that_pad_a_graph_are_not_touched(backend):
    common = step([1, 1], [30, 17], padded=2)
    o, (q, _, _), cache = run(backend, common)
    torch.testing.assert_close(o, truth(common, q, cache), atol=1e-5, rtol=0)


def test_a_layer_that_reads_anothers_cache_does_not_write(backend):
    common = step([2, 1], [30, 17])
    before = drawn(*backend.PagedBackend.get_kv_cache_shape(64, BLOCK, 2, 32), seed=9)
    _, _, cache = run(backend, common, kv_sharing_target_layer_name="other")
    assert torch.equal(cache, before)


def test_a_run_that_measures_memory_gives_zeros(backend):
    layer = backend.PagedImpl(4, 32, 1.0, 2)
    output = torch.full((3, 4 * 32), float("nan"))
    assert bool((layer.forward(None, *[output] * 3, None, None, output) == 0).all())


def test_shared_prefixes_are_read_once_with_the_same_result(backend):
    common = step([1] * 9, [300 + n for n in range(9)], shared_blocks=17)
    metadata = built(backend, common, prefix=272)
    assert metadata.shared is not None
    assert metadata.shared.saved_tokens == 8 * 272
    o, (q, _, _), cache = run(
        backend, common, prefix=272, cache=drawn(240, 2, BLOCK, 2, 32, seed=9)
    )
    torch.testing.assert_close(o, truth(common, q, cache), atol=1e-5, rtol=0)


def test_layers_share_the_plan_that_the_first_of_them_makes(backend):
    common = step([20, 1, 7], [20, 37, 50])
    metadata = built(backend, common)
    assert metadata.plans is None  # a CPU has no use for plans
    metadata.plans = StepPlans()
    fused = drawn(28, 8 * 32)  # queries, keys and values are parts of one product's result
    q, k, v = (x.view(28, -1, 32) for x in fused.split([4 * 32, 2 * 32, 2 * 32], dim=1))
    layer = backend.PagedImpl(4, 32, 32**-0.5, 2)
    for seed in (8, 9):
        cache = drawn(*backend.PagedBackend.get_kv_cache_shape(64, BLOCK, 2, 32), seed=seed)
        o = layer.forward(None, q, k, v, cache, metadata, torch.zeros(28, 4, 32))
        torch.testing.assert_close(o, truth(common, q, cache), atol=1e-5, rtol=0)
    assert len(metadata.plans) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("heads_first", [False, True])
def test_a_graph_makes_its_plan_from_the_lengths_that_it_finds(backend, heads_first):
    """As vLLM does: metadata of their own for the run before the capture and for the capture."""
    common = step([1] * 6, [40, 37, 5, 18, 33, 64], padded=2)
    for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
        setattr(common, name, getattr(common, name).cuda())
    common.slot_mapping = torch.cat([common.slot_mapping, common.slot_mapping.new_full((2,), -1)])
    common.num_actual_tokens = 8
    caches = [drawn(64, 2, BLOCK, 2, 64, seed=seed).cuda().bfloat16() for seed in (8, 9)]
    given = caches
    if heads_first:  # as since vLLM 0.33
        given = [cache.permute(0, 3, 2, 1, 4).flatten(3) for cache in caches]
    q, k, v = (drawn(8, heads, 64).cuda().bfloat16() for heads in (4, 2, 2))
    layer = backend.PagedImpl(4, 64, 0.125, 2)
    outputs = [torch.full((8, 4, 64), float("nan"), device="cuda").bfloat16() for _ in caches]

    def layers():
        builder = backend.PagedBuilder(
            SimpleNamespace(block_size=BLOCK), [], SimpleNamespace(), torch.device("cuda")
        )
        metadata = builder.build(0, common)
        for cache, output in zip(given, outputs, strict=True):
            layer.forward(None, q, k, v, cache, metadata, output)
        assert len(metadata.plans) == 1

    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        layers()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            layers()
    for lengths in ([40, 37, 5, 18, 33, 64], [3, 30, 48, 1, 64, 17], [64] * 6):
        common.seq_lens.copy_(torch.tensor([*lengths, 0, 0]))
        graph.replay()
        for cache, output in zip(given, outputs, strict=True):
            if heads_first:
                cache = torch.stack(cache.transpose(1, 2).chunk(2, dim=-1), dim=1)
            wanted = paged.paged_attention(
                q[:6].cpu(), *cache.cpu().unbind(1), block_table=common.block_table_tensor.cpu(),
                seqlens_k=common.seq_lens.cpu(), cu_seqlens_q=common.query_start_loc.cpu(),
            )  # fmt: skip
            o = output[:6].cpu().float()
            torch.testing.assert_close(o, wanted.float(), atol=2e-2, rtol=0)


@pytest.mark.parametrize(
    ("length", "count", "rules", "takes"),
    [
        (256, 8, {}, True), (255, 8, {}, False), (256, 7, {}, False),
        (256, 8, {"use_alibi": True}, False), (256, 8, {"use_sliding_window": True}, False),
        (256, 8, {"dcp_world_size": 2}, False),
    ],
)  # fmt: skip
def test_a_prefix_is_read_once_where_that_pays(backend, length, count, rules, takes):
    spec = SimpleNamespace(block_size=BLOCK)
    builder = backend.PagedBuilder(spec, [], SimpleNamespace(), torch.device("cpu"))
    given = {
        "use_alibi": False, "use_sliding_window": False, "use_local_attention": False,
        "num_sms": 132, "dcp_world_size": 1, "num_query_heads": 4, "num_kv_heads": 2,
    }  # fmt: skip
    assert builder.use_cascade_attention(length, [1] * count, **given | rules) is takes


def test_what_is_refused(backend):
    with pytest.raises(UnsupportedError, match="attn_type must be decoder"):
        backend.PagedImpl(4, 32, 1.0, 2, attn_type="encoder")
    layer, x = backend.PagedImpl(4, 32, 1.0, 2), torch.zeros(1)
    with pytest.raises(UnsupportedError, match="output_scale must be None"):
        layer.forward(None, x, x, x, x, None, x, output_scale=x)
    common = step([1], [3])
    common.causal = False
    with pytest.raises(UnsupportedError, match="must be causal"):
        built(backend, common)


def test_head_sizes_and_cards_are_those_of_the_kernels(backend):
    sizes = [64, 128, 192, 256, 512]
    assert all(map(backend.PagedBackend.supports_head_size, sizes))
    assert not any(map(backend.PagedBackend.supports_head_size, (0, 100, 520)))
    cards = [SimpleNamespace(major=major) for major in (7, 8, 9)]
    assert [backend.PagedBackend.supports_compute_capability(c) for c in cards] == [0, 1, 1]


def test_a_decode_step_over_latents_is_right(latent):
    rank, rope, heads = 64, 16, 8
    common = step([1, 1, 1], [40, 7, 33])
    layer = latent.LatentImpl(
        heads, rank + rope, 0.1, 1, None, None, "auto", None, "decoder", None, kv_lora_rank=rank
    )
    cache = drawn(64, BLOCK, rank + rope)
    q = drawn(3, heads, rank + rope, seed=1)
    decode = SimpleNamespace(block_table=common.block_table_tensor, seq_lens=common.seq_lens)
    wanted, wanted_lse = mla.mla_decode(
        q[..., :rank], q[..., rank:], cache, block_table=common.block_table_tensor,
        seqlens_k=common.seq_lens, cu_seqlens_q=common.query_start_loc, softmax_scale=0.1,
        return_lse=True,
    )  # fmt: skip
    for given in (q, q.split((rank, rope), dim=-1)):
        if isinstance(given, tuple):
            given = tuple(x.contiguous() for x in given)
        o, lse = layer.forward_mqa(given, cache, SimpleNamespace(decode=decode), None)
        torch.testing.assert_close(o, wanted, atol=1e-5, rtol=0)
        torch.testing.assert_close(lse, wanted_lse.transpose(0, 1), atol=1e-5, rtol=0)
    with pytest.raises(UnsupportedError, match="slopes, windows and softcap"):
        latent.LatentImpl(
            heads, 80, 0.1, 1, None, 9, "auto", None, "decoder", None, kv_lora_rank=rank
        )


def test_vllm_finds_the_plugins_and_one_of_them_has_its_place(registered, monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = project["entry-points"]["vllm.general_plugins"]
    for path in found.values():
        module, _, name = path.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    plugin.register()
    plugin.register_latent()  # as vLLM does that is told of no plugin
    assert registered == {"CUSTOM": "tilewise.integrations.vllm.paged.PagedBackend"}
    monkeypatch.setenv("VLLM_PLUGINS", "tilewise_latent")
    plugin.register_latent()
    assert registered == {"CUSTOM": "tilewise.integrations.vllm.latent.LatentBackend"}
    for path in ("paged.PagedBackend", "latent.LatentBackend"):
        module, _, name = path.partition(".")
        assert hasattr(importlib.import_module(f"tilewise.integrations.vllm.{module}"), name)


def test_without_vllm_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="pip install vllm"):
        plugin.register()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_record_is_vllms_interface():
    """Where vLLM's Python parts can be imported, with or without its compiled ones."""
    real = pytest.importorskip("vllm.v1.attention.backend", exc_type=ImportError)
    version = sys.modules["vllm"].__version__
    record = next((x for x in RECORDS.values() if x["version"] == version), None)
    if record is None:
        pytest.skip(f"no record of vLLM {version}")
    for name in ("AttentionBackend", "AttentionImpl", "AttentionMetadataBuilder",
                 "MLAAttentionImpl"):  # fmt: skip
        for method, wanted in record[name].items():
            given = inspect.signature(getattr(getattr(real, name), method)).parameters
            assert [p for p in given if p not in ("self", "cls")] == wanted, f"{name}.{method}"
    fields = [*real.CommonAttentionMetadata.__dataclass_fields__]
    assert fields == record["CommonAttentionMetadata"]
    ours = importlib.import_module("tilewise.integrations.vllm.paged")
    for one in (ours.PagedBackend, ours.PagedImpl, ours.PagedBuilder):
        assert not one.__abstractmethods__
    reasons = ours.PagedBackend.validate_configuration(
        128, torch.bfloat16, "auto", 16, False, True, False, False, False,
        SimpleNamespace(major=9), "decoder",
    )  # fmt: skip
    assert reasons == []
