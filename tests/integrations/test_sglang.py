"""The attention backends of SGLang: their form is SGLang's, and steps give what the formulas say.

SGLang's interface is recorded (`sglang_recorded.py`), so the everyday run needs no SGLang; where
its sources lie in the path the slow tests compare the record with them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.integrations import sglang_recorded
from tests.integrations.sglang_recorded import MODES, RECORDED, recorded
from tilewise.errors import UnsupportedError
from tilewise.integrations import sglang as plugin
from tilewise.nn.context import StepPlans
from tilewise.reference import mla, paged
from tilewise.reference import standard as dense

ROOT = Path(__file__).resolve().parents[2]
SLOTS, CONTEXT = 288, 64


@pytest.fixture
def registered(monkeypatch):
    return sglang_recorded.install(monkeypatch)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Pool:
    """SGLang's pool of one layer: keys and values, or latents where there are no values."""

    def __init__(self, heads, dim, value_dim=None, dtype=torch.float32):
        self.k = drawn(SLOTS, heads, dim, seed=8).to(dtype)
        self.v = drawn(SLOTS, heads, dim if value_dim is None else value_dim, seed=9).to(dtype)
        self.kv_cache_dim = dim
        self.written = []

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        loc = loc_info.loc
        self.written.append(loc_info)
        scales = (k_scale or 1.0, v_scale or 1.0)
        for buffer, new, scale in zip((self.k, self.v), (cache_k, cache_v), scales, strict=True):
            if new.shape[1:] == buffer.shape[1:]:
                buffer[loc] = (new / scale).to(buffer.dtype)

    def get_kv_buffer(self, layer_id):
        return self.k, self.v

    def get_key_buffer(self, layer_id):
        return self.k


class WindowPool(Pool, sglang_recorded.SWAKVPool):
    """A pool whose slots are elsewhere: the windows' pages come in the other order."""

    layers_mapping = {0: (0, True)}  # noqa: RUF012

    def translate_loc_from_full_to_swa(self, kv_indices):
        page = 8
        return (SLOTS // page - 1 - kv_indices // page) * page + kv_indices % page


def runner(pool, page, mla_backend=False, **more):
    """What a backend is made of; its table of slots has pages in no order."""
    pages = torch.randperm(SLOTS // page - 1, generator=torch.Generator().manual_seed(1)) + 1
    rows = 4
    each = CONTEXT // page
    slots = pages[: rows * each, None] * page + torch.arange(page)
    table = torch.zeros(rows + 1, CONTEXT, dtype=torch.int32)
    table[1:] = slots.view(rows, CONTEXT)
    given = SimpleNamespace(
        device="cpu", page_size=page, use_mla_backend=mla_backend, token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=table), kv_cache_dtype=pool.k.dtype,
        model_config=SimpleNamespace(context_len=CONTEXT, is_encoder_decoder=False),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
    )  # fmt: skip
    vars(given).update(more)
    return given


def layer(heads=(4, 2), dim=32, value_dim=None, **more):
    given = SimpleNamespace(
        tp_q_head_num=heads[0], tp_k_head_num=heads[1], qk_head_dim=dim, layer_id=0,
        v_head_dim=dim if value_dim is None else value_dim, scaling=dim**-0.5, logit_cap=0.0,
        sliding_window_size=-1, is_cross_attention=False, k_scale=None, v_scale=None,
        k_scale_float=None, v_scale_float=None, xai_temperature_len=-1,
        attn_type=sys.modules["sglang.srt.layers.radix_attention"].AttentionType.DECODER,
    )  # fmt: skip
    vars(given).update(more)
    return given


def batch(runner, queries, lengths, mode="EXTEND", on_host=True):
    """A batch of sequences that own rows 1, 2, ... of the table."""
    table = runner.req_to_token_pool.req_to_token
    rows = torch.arange(1, len(lengths) + 1)
    new = [table[r, n - q : n] for r, q, n in zip(rows, queries, lengths, strict=True)]
    seq_lens = torch.tensor(lengths)
    return SimpleNamespace(
        forward_mode=MODES[mode], batch_size=len(lengths), req_pool_indices=rows,
        seq_lens=seq_lens, seq_lens_cpu=seq_lens if on_host else None,
        out_cache_loc=torch.cat(new).long(), extend_seq_lens=torch.tensor(queries),
        extend_seq_lens_cpu=queries,
    )  # fmt: skip


def truth(runner, given, q, k, v, **options):
    """The formulas over pages of one token, which are SGLang's slots."""
    table = runner.req_to_token_pool.req_to_token[given.req_pool_indices]
    edges = torch.tensor([0, *given.extend_seq_lens_cpu]).cumsum(0)
    return paged.paged_attention(
        q, k[:, None], v[:, None], block_table=table, seqlens_k=given.seq_lens,
        cu_seqlens_q=edges, **options,
    )  # fmt: skip


def made(registered, one):
    plugin.register()
    return registered["tilewise"](one)


def run(registered, queries, lengths, *, mode="EXTEND", page=8, pool=None, on_host=True, **given):
    """One layer's step; returns o (T, Hq, Dv), the formulas' o, and the backend."""
    sinks, options = given.pop("sinks", None), given.pop("options", {})
    pool = Pool(2, 32) if pool is None else pool
    one = runner(pool, page)
    backend = made(registered, one)
    step = batch(one, queries, lengths, mode, on_host)
    total = sum(queries)
    q, k, v = (drawn(total, n, 32, seed=i) for i, n in enumerate((4, 2, 2)))
    backend.init_forward_metadata(step)
    forward = backend.forward_decode if mode == "DECODE" else backend.forward_extend
    o = forward(q.view(total, -1), k, v, layer(**given), step, sinks=sinks)
    wanted = truth(one, step, q, pool.k.float(), pool.v.float(), **options)
    return o.view(total, 4, -1), wanted, backend


def test_every_method_takes_what_sglang_gives_it(registered):
    paged_, latent = (
        getattr(importlib.import_module(f"tilewise.integrations.sglang.{name}"), kind)
        for name, kind in (("paged", "PagedBackend"), ("latent", "LatentBackend"))
    )
    seen = 0
    for one in (paged_, latent):
        for method, wanted in recorded("AttentionBackend").items():
            if hasattr(one, method):
                given = [*inspect.signature(getattr(one, method)).parameters]
                assert [p for p in given if p not in ("self", "sinks")] == wanted, method
                seen += 1
    assert seen == 12


OPTIONS = {
    "plain": ({}, {}),
    "window": ({"sliding_window_size": 8}, {"window": 9}),
    "softcap": ({"logit_cap": 5.0}, {"softcap": 5.0}),
    "sinks": ({"sinks": torch.tensor([0.5, 0.0, -1.0, 2.0])},
              {"sinks": torch.tensor([0.5, 0.0, -1.0, 2.0])}),
}  # fmt: skip


@pytest.mark.parametrize("page", [1, 8])
@pytest.mark.parametrize("name", OPTIONS)
def test_prompts_and_decode_rows_of_one_step_are_right(registered, name, page):
    theirs, ours = OPTIONS[name]
    queries, lengths = [20, 1, 7], [20, 37, 50]
    o, wanted, _ = run(registered, queries, lengths, mode="MIXED", page=page, options=ours,
                       **theirs)  # fmt: skip
    torch.testing.assert_close(o, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("on_host", [True, False])
def test_a_decode_step_is_right_with_and_without_lengths_on_the_host(registered, on_host):
    o, wanted, _ = run(registered, [1] * 3, [30, 17, 64], mode="DECODE", on_host=on_host)
    torch.testing.assert_close(o, wanted, atol=1e-5, rtol=0)


def test_an_8_bit_pool_has_the_scales_of_the_layer(registered):
    pool = Pool(2, 32, dtype=torch.float8_e4m3fn)
    one = runner(pool, 8)
    backend = made(registered, one)
    step = batch(one, [3, 1], [30, 17])
    q, k, v = (drawn(4, n, 32, seed=i) for i, n in enumerate((4, 2, 2)))
    backend.init_forward_metadata(step)
    given = layer(k_scale=0.5, v_scale=0.25, k_scale_float=0.5, v_scale_float=0.25)
    o = backend.forward_extend(q, k, v, given, step)
    wanted = truth(one, step, q, pool.k.float() * 0.5, pool.v.float() * 0.25)
    torch.testing.assert_close(o.view(4, 4, 32), wanted, atol=1e-3, rtol=1e-2)


def test_layers_with_windows_have_pages_of_their_own(registered):
    pool = WindowPool(2, 32)
    one = runner(pool, 8)
    backend = made(registered, one)
    step = batch(one, [5, 1], [30, 17])
    q, k, v = (drawn(6, n, 32, seed=i) for i, n in enumerate((4, 2, 2)))
    backend.init_forward_metadata(step)
    o = backend.forward_extend(q, k, v, layer(sliding_window_size=8), step)
    there = pool.translate_loc_from_full_to_swa(torch.arange(SLOTS))
    wanted = truth(one, step, q, pool.k[there], pool.v[there], window=9)
    torch.testing.assert_close(o.view(6, 4, 32), wanted, atol=1e-5, rtol=0)
    expected = pool.translate_loc_from_full_to_swa(step.out_cache_loc)
    assert torch.equal(pool.written[0].swa_loc, expected)


def test_rows_that_pad_a_step_are_zero(registered):
    pool = Pool(2, 32)
    one = runner(pool, 8)
    backend = made(registered, one)
    step = batch(one, [3, 1], [30, 17])
    backend.init_forward_metadata(step)
    o = backend.forward_extend(drawn(9, 4, 32), None, None, layer(), step)
    assert o.shape == (9, 128)
    assert bool((o[4:] == 0).all())
    assert bool((o[:4] != 0).any())


def test_a_layer_that_reads_anothers_pool_does_not_write(registered):
    pool = Pool(2, 32)
    one = runner(pool, 8)
    backend = made(registered, one)
    step = batch(one, [1], [30], "DECODE")
    backend.init_forward_metadata(step)
    q, k = drawn(1, 4, 32), drawn(1, 2, 32)
    backend.forward_decode(q, k, k, layer(), step, save_kv_cache=False)
    backend.forward_decode(q, None, None, layer(), step)
    assert pool.written == []


@pytest.mark.parametrize("has_plans", [False, True])
def test_a_graph_reads_buffers_that_stay_where_they_are(registered, monkeypatch, has_plans):
    """Captured with one batch, replayed with another, of which two rows pad."""
    if has_plans:  # as on a GPU
        monkeypatch.setattr(StepPlans, "on", classmethod(lambda cls, device: cls()))
    pool = WindowPool(2, 32)
    one = runner(pool, 8)
    backend = made(registered, one)
    backend.init_cuda_graph_state(4, 4)
    backend.init_forward_metadata_out_graph(batch(one, [1] * 4, [1] * 4, "DECODE"), in_capture=True)
    captured = backend.forward_metadata
    step = batch(one, [1] * 4, [30, 17, 1, 1], "DECODE")
    step.req_pool_indices[2:] = 0
    step.out_cache_loc[2:] = 0
    backend.init_forward_metadata_out_graph(step)
    replayed = backend.forward_metadata
    for name in ("edges", "seq_lens", "block_table", "window_table", "window_slots"):
        then, now = getattr(captured, name), getattr(replayed, name)
        assert (then.data_ptr(), then.shape) == (now.data_ptr(), now.shape)
    assert captured.plans is replayed.plans
    assert (captured.plans is not None) is has_plans
    backend.forward_metadata = captured
    pool.layers_mapping = {0: (0, False)}
    q = drawn(4, 4, 32)
    o = backend.forward_decode(q, None, None, layer(), step)
    step.extend_seq_lens_cpu = [1] * 4
    wanted = truth(one, step, q, pool.k, pool.v)
    torch.testing.assert_close(o.view(4, 4, 32), wanted, atol=1e-5, rtol=0)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("is_captured", [False, True], ids=["filled", "filled by a graph"])
def test_a_graph_of_a_gpu_follows_the_lengths(registered, is_captured):
    """As SGLang does: filled and run before the capture; filled again before each replay."""
    pool = Pool(2, 64)
    pool.k, pool.v = pool.k.cuda().bfloat16(), pool.v.cuda().bfloat16()
    one = runner(pool, 16, device="cuda")
    table = one.req_to_token_pool.req_to_token = one.req_to_token_pool.req_to_token.cuda()
    backend = made(registered, one)
    backend.init_cuda_graph_state(4, 4)
    q = drawn(4, 4, 64).cuda().bfloat16()

    def given(lengths):
        lengths = torch.tensor(lengths)
        rows = torch.arange(1, 5, device="cuda")
        return SimpleNamespace(
            forward_mode=MODES["DECODE"], batch_size=4, req_pool_indices=rows,
            seq_lens=lengths.cuda(), seq_lens_cpu=lengths, extend_seq_lens_cpu=[1] * 4,
            out_cache_loc=table[rows, lengths.cuda() - 1].long(),
        )  # fmt: skip

    static = given([1, 1, 1, 1])
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    stream, graph, fill = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        backend.forward_decode(q, None, None, layer(dim=64), static)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            o = backend.forward_decode(q, None, None, layer(dim=64), static)
        if is_captured:
            backend.init_forward_metadata_out_graph(static)
            with torch.cuda.graph(fill, stream=stream):
                backend.init_forward_metadata_out_graph(static)
    torch.cuda.synchronize()
    for lengths in ([30, 17, 1, 2], [3, CONTEXT, 33, 64]):
        step = given(lengths)
        if is_captured:
            static.seq_lens.copy_(step.seq_lens)
            fill.replay()
        else:
            backend.init_forward_metadata_out_graph(step)
        graph.replay()
        wanted = paged.paged_attention(
            q.cpu(), pool.k.cpu()[:, None], pool.v.cpu()[:, None], block_table=table[1:].cpu(),
            seqlens_k=step.seq_lens_cpu, cu_seqlens_q=torch.arange(5),
        )  # fmt: skip
        o_now = o.view(4, 4, 64).cpu().float()
        torch.testing.assert_close(o_now, wanted.float(), atol=2e-2, rtol=0)


@pytest.mark.parametrize("queries", [[1, 1, 1], [20, 1, 7]])
def test_absorbed_rows_over_latents_are_right(registered, queries):
    rank, rope, heads, lengths = 64, 16, 8, [40, 7, 33]
    pool = Pool(1, rank + rope)
    one = runner(pool, 8, mla_backend=True)
    backend = made(registered, one)
    queries = [min(q, n) for q, n in zip(queries, lengths, strict=True)]
    mode = "DECODE" if max(queries) == 1 else "EXTEND"
    step = batch(one, queries, lengths, mode)
    total = sum(queries)
    q, k = drawn(total, heads, rank + rope), drawn(total, 1, rank + rope, seed=3)
    given = layer((heads, 1), rank + rope, rank, scaling=0.1)
    backend.init_forward_metadata(step)
    o = backend.forward_extend(q.view(total, -1), k, k[..., :rank], given, step)
    assert torch.equal(pool.k[step.out_cache_loc], k)
    wanted = mla.mla_decode(
        q[..., :rank], q[..., rank:], pool.k,
        block_table=one.req_to_token_pool.req_to_token[step.req_pool_indices],
        seqlens_k=step.seq_lens, cu_seqlens_q=torch.tensor([0, *queries]).cumsum(0),
        softmax_scale=0.1,
    )  # fmt: skip
    torch.testing.assert_close(o.view(total, heads, rank), wanted, atol=1e-5, rtol=0)


def test_whole_prompts_attend_to_expanded_keys(registered):
    """As SGLang gives them: nothing to write, padded by two rows."""
    heads, dim, value_dim, queries = 4, 48, 32, [9, 5]
    pool = Pool(1, 80)
    one = runner(pool, 8, mla_backend=True)
    backend = made(registered, one)
    step = batch(one, queries, queries)
    q, k = (drawn(16, heads, dim, seed=i) for i in range(2))
    v = drawn(16, heads, value_dim, seed=2)
    backend.init_forward_metadata(step)
    given = layer((heads, heads), dim, value_dim, scaling=0.2)
    o = backend.forward_extend(q, k, v, given, step, save_kv_cache=False).view(16, heads, -1)
    assert bool((o[14:] == 0).all())
    for begin, end in ((0, 9), (9, 14)):
        part = [x[None, begin:end] for x in (q, k, v)]
        wanted = dense.attention(*part, causal=True, softmax_scale=0.2)[0]
        torch.testing.assert_close(o[begin:end], wanted, atol=1e-5, rtol=0)
    assert pool.written == []


def test_what_is_refused(registered):
    pool = Pool(2, 32)
    spec = SimpleNamespace(is_none=lambda: False)
    with pytest.raises(UnsupportedError, match="speculative_algorithm must be None"):
        made(registered, runner(pool, 8, spec_algorithm=spec))
    config = SimpleNamespace(context_len=CONTEXT, is_encoder_decoder=True)
    with pytest.raises(UnsupportedError, match="must be a decoder"):
        made(registered, runner(pool, 8, model_config=config))
    with pytest.raises(UnsupportedError, match="e4m3, got torch.float8_e5m2"):
        made(registered, runner(pool, 8, kv_cache_dtype=torch.float8_e5m2))
    with pytest.raises(UnsupportedError, match="16 or 32 bits, got torch.float8_e4m3fn"):
        made(registered, runner(pool, 8, True, kv_cache_dtype=torch.float8_e4m3fn))
    one = runner(pool, 8)
    backend = made(registered, one)
    with pytest.raises(UnsupportedError, match="got TARGET_VERIFY"):
        backend.init_forward_metadata(batch(one, [1], [9], "TARGET_VERIFY"))
    with pytest.raises(UnsupportedError, match="graph must be of decode steps"):
        backend.init_forward_metadata_out_graph(batch(one, [1], [9], "EXTEND"))
    step = batch(one, [1], [9], "DECODE")
    backend.init_forward_metadata(step)
    types = sys.modules["sglang.srt.layers.radix_attention"].AttentionType
    q = drawn(1, 4, 32)
    for change, message in (
        ({"attn_type": types.ENCODER_ONLY}, "attn_type must be decoder"),
        ({"is_cross_attention": True}, "attn_type must be decoder"),
        ({"xai_temperature_len": 1024}, "xai_temperature_len must be -1"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            backend.forward_decode(q, None, None, layer(**change), step)
    over_latents = made(registered, runner(Pool(1, 80), 8, True))
    over_latents.init_forward_metadata(step)
    with pytest.raises(UnsupportedError, match="windows and softcap must be off"):
        over_latents.forward_decode(q, None, None, layer(logit_cap=3.0), step)


def test_sglang_finds_the_plugin_and_its_options_take_the_name(registered):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (path,) = project["entry-points"]["sglang.srt.plugins"].values()
    module, _, name = path.partition(":")
    getattr(importlib.import_module(module), name)()
    plugin.register()  # a second time, as a process may
    choices = sys.modules["sglang.srt.arg_groups.choices"]
    for listed in RECORDED["arg_groups/choices.py:"]["names"][:3]:
        assert getattr(choices, listed) == ["tilewise"]
    assert [*registered] == ["tilewise"]


def test_without_sglang_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ImportError, match="pip install sglang"):
        plugin.register()


@pytest.mark.slow
def test_the_record_is_sglangs_interface():
    """Where SGLang's sources lie in the path; they need not be importable."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("sglang is not installed")
    assert sglang_recorded.read(Path(found.submodule_search_locations[0]) / "srt") == RECORDED
