"""The attention bench: FLOPs by the papers, checked results, failures that are rows, all tables."""

from __future__ import annotations

import json
import multiprocessing
import sys
import types
from dataclasses import replace
from functools import partial

import pytest
import torch

from tilewise import ops
from tilewise.bench import (
    attention,
    case,
    compile_ahead,
    flex,
    measure,
    passes,
    peers,
    tables,
    timing,
    truth,
)
from tilewise.bench.passes import Budget
from tilewise.bench.problem import OPS, Problem
from tilewise.bench.roofline import Ceilings
from tilewise.reference.standard import attention as by_the_book

pytestmark = pytest.mark.usefixtures("timed_once")
CEILINGS = Ceilings("cpu", "a processor", torch.__version__, 1e12, 1e10, 1e10)
TINY = replace(
    tables.SCALES["cpu"],
    tokens=32,
    hidden=128,
    seqlens=(48, 64),
    all_up_to=48,
    ours_only=(96,),
    flex_seqlens=(48,),
    window_left=20,
    rule_seqlens=(256,),
    feature_seqlen=48,
    varlen=(10, 30, 50),
    published_seqlens=(40,),
    published_heads=8,
)
SMALL = Problem("dense", 2, 48, 2, 2, 32, 32, ("tilewise",))


def budget(seconds=3600.0, measurements=10**9):
    """Time for everything, and next to nothing of it for one measurement."""
    return Budget(seconds, 10**9)


@pytest.fixture
def on_reference(monkeypatch):
    """Ours by the backend that knows every feature and compiles nothing."""
    for name in ("attention", "attention_varlen"):
        call = partial(getattr(ops, name), backend="reference")
        monkeypatch.setattr(peers.ops, name, call)


@pytest.fixture
def fake_flex(monkeypatch):
    """FlexAttention by the book, since compiling it takes seconds a shape."""

    def compiled(problem_case, *, needs_gradient):
        n = problem_case.problem.seqlen
        visible = problem_case.visible(torch.arange(n))
        return lambda *qkv: by_the_book(*(t.detach() for t in qkv), mask=visible)

    monkeypatch.setattr(flex, "compiled", compiled)


def numbers(rows):
    """Those of the rows that have numbers, by op and peer."""
    return {(row["op"], row["peer"]): row for row in rows if "ms" in row}


@pytest.mark.parametrize(
    "rule",
    [
        {}, {"window_left": 5, "causal": True}, {"window_left": 90, "causal": True},
        {"density": 0.4}, {"density": 0.4, "causal": True},
        {"density": 0.6, "window_left": 150, "causal": True},
    ],
    ids=str,
)  # fmt: skip
def test_visible_entries_are_those_of_the_rule(rule):
    problem = replace(SMALL, seqlen=512 if "density" in rule else 48, **rule)
    drawn = case.make_case(problem, "cpu")
    shown = int(drawn.visible(torch.arange(problem.seqlen)).sum())
    assert problem.visible_entries() == 2 * shown
    mask = case.block_mask(problem, "cpu")
    want = by_the_book(drawn.q, drawn.k, drawn.v, mask=drawn.visible(torch.arange(problem.seqlen)))
    got = ops.attention(drawn.q, drawn.k, drawn.v, mask=mask, backend="reference")
    torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)


def test_flops_are_those_of_the_papers():
    causal = replace(SMALL, causal=True)
    forward = 4 * 2 * 2 * 48 * 48 * 32 / 2
    assert [causal.flops(op) for op in OPS] == [forward, 2.5 * forward, 3.5 * forward]
    packed = replace(causal, lengths=(3, 48))
    assert packed.flops("forward") == 4 * 2 * 32 * (3 * 3 + 48 * 48) / 2
    wide = replace(SMALL, head_dim=48, v_head_dim=16)
    entries = 2 * 2 * 48 * 48
    assert wide.flops("forward") == 2 * entries * (48 + 16)
    assert wide.flops("backward") == 2 * entries * (3 * 48 + 2 * 16)
    assert SMALL.flops("jvp") is None


def test_a_row_has_time_memory_speed_and_its_rank(on_reference):
    problem = replace(SMALL, peers=("tilewise", "sdpa_flash", "standard"), causal=True)
    found = numbers(attention.run([problem], "cpu", CEILINGS, budget()))
    assert len(found) == 9
    for (op, _), row in found.items():
        assert row["TFLOP/s"] * row["ms"] == pytest.approx(problem.flops(op) / 1e9)
        assert row["% of matmul"] == pytest.approx(100 * row["TFLOP/s"])
        assert row["spread"] >= 0
        assert row["repeats"] >= 3
        assert row["peak_MB"] >= 0
    for op in OPS:
        times = {peer: row["ms"] for (of, peer), row in found.items() if of == op}
        best = min(times["sdpa_flash"], times["standard"])
        for peer, time in times.items():
            assert found[op, peer]["x best peer"] == pytest.approx(best / time)


@pytest.mark.parametrize("feature", [f for f in case.FEATURES if f != "random blocks"])
def test_every_feature_agrees_with_the_truth(feature, on_reference):
    kv_heads = 1 if feature == "GQA 8:1" else 2
    problem = replace(SMALL, causal=True, num_kv_heads=kv_heads, feature=feature)
    rows = measure.measure(problem, "cpu", CEILINGS, budget())
    assert len(numbers(rows)) == 3, rows


def test_every_table_runs_and_the_last_line_is_all_of_it(
    monkeypatch, tmp_path, capsys, on_reference, fake_flex
):
    monkeypatch.setitem(tables.SCALES, "cpu", TINY)
    monkeypatch.setattr(attention, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(attention, "Budget", budget)
    path = tmp_path / "attention.json"
    assert attention.main(["--device", "cpu", "--seconds", "3600", "--json", str(path)]) == 0
    output = capsys.readouterr()
    document = json.loads(output.out.splitlines()[-1])
    assert document == json.loads(path.read_text())
    rows = document["rows"]
    assert {row["table"] for row in rows} == set(tables.TABLES) - {"fp8"}  # of a GPU's scale only
    failed = [row for row in rows if "error" in row]
    assert not [row for row in failed if row["peer"].startswith("tilewise")], failed
    assert not [row for row in failed if "wrong result" in row["error"]], failed
    progress = output.err.splitlines()
    assert len(progress) == len(attention.plan(tables.TABLES, TINY)) + 1
    assert "features N 48 D 128 causal: 6 numbers; tilewise forward" in progress[0]
    assert progress[-1].startswith("left out: ")
    assert "first calls, which compile and load kernels" in progress[-1]
    bias = next(row for row in rows if row["feature"] == "bias" and row["op"] == "backward")
    plain = next(row for row in rows if row["table"] == "features" and row["op"] == "backward")
    assert bias["x plain"] == pytest.approx(bias["ms"] / plain["ms"])
    sparse = next(row for row in rows if row["feature"] == "random blocks" and "ms" in row)
    assert {"x plain", "density"} <= sparse.keys()
    long = [row for row in rows if row["table"] == "dense" and row["N"] == 96]
    assert [(row["op"], row["peer"]) for row in long] == [("forward", "tilewise")]


def test_beyond_some_n_a_cpu_measures_fewer_passes():
    problems = [problem for problem in tables.dense(TINY) if problem.seqlen == 64]
    fused, square = problems[:2]
    assert (fused.peers, fused.ops) == (("tilewise", "sdpa_flash"), ("forward", "backward"))
    assert (square.peers, square.ops) == (("sdpa_math", "standard"), ("forward",))
    assert replace(fused, peers=(), ops=()) == replace(square, peers=(), ops=())
    rows = [
        {"op": "forward", "peer": peer, "ms": ms} | fused.columns()
        for peer, ms in (("tilewise", 2.0), ("sdpa_flash", 5.0), ("standard", 3.0))
    ]
    measure.compare_peers(rows)
    assert [row["x best peer"] for row in rows] == [1.5, 0.6, 1.0]


def test_tables_can_be_chosen_and_n_given(monkeypatch, capsys, on_reference):
    monkeypatch.setitem(tables.SCALES, "cpu", replace(TINY, peers=("tilewise",)))
    monkeypatch.setattr(attention, "measure_ceilings", lambda device: CEILINGS)
    attention.main(["--device", "cpu", "--only", "dense", "--seqlens", "32"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {(row["table"], row["N"], row["B"]) for row in rows} == {("dense", 32, 1)}


def test_wrong_outputs_and_wrong_gradients_get_no_number(monkeypatch):
    def late_row_wrong(problem_case):
        def function(q, k, v):
            o = by_the_book(q, k, v, causal=True)
            o[:, -1] += 0.05 * o[:, -1].detach()
            return o

        return peers._run(problem_case, function)

    def gradient_wrong(problem_case):
        def function(q, k, v):
            return by_the_book(q, 0.5 * k + 0.5 * k.detach(), v, causal=True)

        return peers._run(problem_case, function)

    monkeypatch.setitem(peers.PEERS, "late", late_row_wrong)
    monkeypatch.setitem(peers.PEERS, "gradient", gradient_wrong)
    problem = replace(SMALL, peers=("late", "gradient"), causal=True)
    rows = measure.measure(problem, "cpu", CEILINGS, budget())
    assert set(numbers(rows)) == {("forward", "gradient")}
    errors = [row["error"] for row in rows if "error" in row]
    assert [error[:20] for error in errors[:3]] == ["wrong result: o is o"] * 3
    assert [error[:22] for error in errors[3:]] == ["wrong result: dk is of"] * 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"), "out of memory"),
        (MemoryError(), "out of memory"),
        (ValueError("q must be\n  small"), "ValueError: q must be small"),
    ],
)
def test_a_failure_is_a_row_and_the_run_goes_on(error, said, monkeypatch, on_reference):
    def fails(problem_case):
        raise error

    monkeypatch.setitem(peers.PEERS, "sdpa_flash", fails)
    problem = replace(SMALL, peers=("sdpa_flash", "tilewise"))
    rows = measure.measure(problem, "cpu", CEILINGS, budget())
    assert [row["error"] for row in rows[:3]] == [said] * 3
    assert [row["peer"] for row in rows if "ms" in row] == ["tilewise"] * 3


def test_a_failed_backward_pass_leaves_the_forward_row(monkeypatch):
    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, o):
            return o.clone()

        @staticmethod
        def backward(ctx, do):
            raise torch.OutOfMemoryError("CUDA out of memory")

    def peer(problem_case):
        return peers._run(problem_case, lambda q, k, v: NoBackward.apply(by_the_book(q, k, v)))

    monkeypatch.setitem(peers.PEERS, "half", peer)
    rows = measure.measure(replace(SMALL, peers=("half",)), "cpu", CEILINGS, budget())
    assert [row.get("error") for row in rows] == [None, "out of memory", "out of memory"]


def test_a_cpu_refuses_matrices_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(measure, "_free_bytes", lambda: 1 << 20)
    problem = replace(SMALL, seqlen=512, peers=("standard", "sdpa_flash"))
    rows = measure.measure(problem, "cpu", CEILINGS, budget())
    assert all(row["error"].startswith("out of memory: N x N") for row in rows[:3])
    assert set(numbers(rows)) == {(op, "sdpa_flash") for op in OPS}


def test_refusals_of_torch_say_why():
    problem = replace(SMALL, v_head_dim=16, peers=("sdpa_flash",))
    rows = measure.measure(problem, "cpu", CEILINGS, budget())
    assert "No available kernel" in rows[0]["error"]
    assert "same last dimension" in rows[0]["error"]


def test_a_spent_budget_measures_nothing_more(on_reference):
    problem = replace(SMALL, peers=("tilewise", "standard"))
    rows = measure.measure(problem, "cpu", CEILINGS, Budget(0.0, 6))
    assert [row["error"] for row in rows] == ["not measured, the time was up"] * 6


class Slow:
    """A peer whose first pass of each kind takes a minute of a clock that this test owns."""

    def __init__(self, monkeypatch):
        self.now, self.seen, self.timed = 0.0, set(), []
        clock = types.SimpleNamespace(perf_counter=self.read, monotonic=self.read)
        for module in (passes, timing):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setitem(peers.PEERS, "slow", self.peer)

    def read(self):
        return self.now

    def peer(self, problem_case):
        def take(kind):
            self.now += 0.6 if kind in self.seen else 60.0
            self.seen.add(kind)

        class Call(torch.autograd.Function):
            @staticmethod
            def forward(ctx, o):
                take("forward")
                return o.clone()

            @staticmethod
            def backward(ctx, do):
                take("backward")
                return do

        return peers._run(problem_case, lambda q, k, v: Call.apply(by_the_book(q, k, v)))


def test_a_first_call_is_no_number_however_long_the_others_are(monkeypatch):
    Slow(monkeypatch)
    time = budget()
    rows = measure.measure(replace(SMALL, peers=("slow",)), "cpu", CEILINGS, time)
    found = {op: row["ms"] for (op, _), row in numbers(rows).items()}
    assert found == pytest.approx({"forward": 600, "backward": 600, "forward+backward": 1200})
    assert time.first_seconds == pytest.approx(120)


def test_what_no_time_was_left_for_is_one_line(monkeypatch, capsys):
    Slow(monkeypatch)
    problems = [replace(SMALL, peers=("slow",), seqlen=n) for n in (48, 40, 32, 24, 16)]
    rows = attention.run(problems, "cpu", CEILINGS, Budget(30.0, 15))
    assert len(numbers(rows)) == 3  # the first call has used up the time, and is measured
    attention.print_tables(rows)
    output = capsys.readouterr()
    assert "not measured" not in output.out
    assert output.out.count("slow") == 3
    first, calls, left = output.err.splitlines()
    assert ": 3 numbers; tilewise has none" in first
    assert calls == "left out: 2 first calls, which compile and load kernels (120.0 s)"
    assert left.startswith("left out: 4 of 5 calls, as 30 s were up: dense N 40")
    assert "N 24" in left
    assert ", ...; the next run finds the kernels of this one" in left


def test_a_run_without_a_number_fails(monkeypatch, capsys):
    monkeypatch.setitem(tables.SCALES, "cpu", replace(TINY, peers=("tilewise",)))
    monkeypatch.setattr(attention, "measure_ceilings", lambda device: CEILINGS)
    assert attention.main(["--device", "cpu", "--only", "dense", "--seconds", "1e-9"]) == 1
    assert "left out: 9 of 9 calls" in capsys.readouterr().err


def test_shapes_that_peers_publish_are_those_of_their_tables():
    problems = tables.published(tables.SCALES["cuda"])
    shapes = [
        (
            p.seqlen,
            p.num_q_heads,
            p.num_kv_heads,
            p.head_dim,
            p.v_head_dim,
            p.window_left,
            p.feature,
        )
        for p in problems
    ]
    assert shapes == [
        *((n, 64, 8, 128, 128, -1, "plain") for n in (2048, 4096, 8192, 16384, 32768)),
        (4096, 64, 8, 64, 64, 1024, "plain"),
        (16384, 64, 8, 64, 64, 1024, "plain"),
        (8192, 128, 128, 192, 128, -1, "plain"),
        (8192, 128, 128, 192, 128, -1, "deterministic"),
    ]
    assert all(problem.batch == 1 and problem.causal for problem in problems)


@pytest.mark.parametrize("peer", ["tilewise_fp8", "tilewise_fp8_tokens"])
def test_8_bits_are_judged_by_what_they_round(peer):
    problem = replace(SMALL, table="fp8", peers=(peer,), ops=("forward",))
    rows = measure.measure(problem, "cpu", CEILINGS, budget())
    assert numbers(rows).keys() == {("forward", peer)}


def test_kernels_of_8_bits_need_a_gpu():
    problem = replace(SMALL, table="fp8", peers=("tilewise_fp8_tokens_kernel",), ops=("forward",))
    [row] = measure.measure(problem, "cpu", CEILINGS, budget())
    assert "this peer must have a GPU" in row["error"]


def test_the_table_of_8_bits_has_kernel_and_op_with_both_kinds_of_scales():
    problems = tables.fp8(tables.SCALES["cuda"])
    assert len(problems) == 12
    assert {problem.ops for problem in problems} == {("forward",)}
    assert all(set(problem.peers) <= set(peers.PEERS) for problem in problems)
    assert len(problems[0].peers) == 5
    assert tables.fp8(tables.SCALES["cpu"]) == []


def test_peers_that_are_not_installed_are_named_and_left_out(monkeypatch, capsys):
    asked = []
    monkeypatch.setitem(tables.SCALES, "cpu", TINY)
    monkeypatch.setattr(attention, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(
        attention, "run", lambda problems, *_: asked.extend(problems) or [{"ms": 1.0, "table": ""}]
    )
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.ModuleType("flash_attn.cute"))
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    assert attention.main(["--device", "cpu", "--peers", "fa3", "fa4"]) == 0
    error = capsys.readouterr().err
    assert "fa3 is left out: flash_attn_interface is not installed" in error
    assert "fa4 is left out" not in error
    for problem in asked:
        others = len(problem.peers) > 1 and problem.table != "derivatives"
        assert ("fa4" in problem.peers) == others
        assert "fa3" not in problem.peers


def test_flashattention_4_is_called_as_its_interface_wants(monkeypatch):
    calls = []

    def dense(q, k, v, *, causal, window_size=(None, None), deterministic=False):
        calls.append((window_size, deterministic))
        left = window_size[0]
        window = None if left is None else (left, 0)
        o = ops.attention(q, k, v, causal=causal, window=window, backend="reference")
        return o, None

    def packed(q, k, v, *, causal, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        return ops.attention_varlen(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal,
            backend="reference",
        ), None  # fmt: skip

    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_func, module.flash_attn_varlen_func = dense, packed
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    plain = replace(SMALL, causal=True, peers=("fa4",), num_kv_heads=1)
    for problem in (
        plain,
        replace(plain, window_left=5),
        replace(plain, feature="deterministic"),
        replace(plain, batch=2, seqlen=20, lengths=(7, 20), num_kv_heads=2),
    ):
        assert len(numbers(measure.measure(problem, "cpu", CEILINGS, budget()))) == 3
    assert set(calls) == {
        ((None, None), False),
        ((5, 0), False),
        ((None, None), True),
    }
    with pytest.raises(NotImplementedError, match="this peer must have no feature"):
        peers.PEERS["fa4"](case.make_case(replace(SMALL, feature="softcap"), "cpu"))


def test_shares_of_a_budget_grow_when_measurements_are_done_with():
    time = Budget(10.0, 100)
    assert time.share() == pytest.approx(0.03, rel=0.1)
    time.finish(90)
    assert time.share() == pytest.approx(0.3, rel=0.1)
    time.finish(10)
    assert time.share() == 0.5
    assert Budget(1.0, 10**6).share() == 0.02


def test_peers_refuse_what_they_would_compute_wrongly():
    windowed = case.make_case(replace(SMALL, window_left=3, causal=True), "cpu")
    capped = case.make_case(replace(SMALL, feature="softcap"), "cpu")
    for problem_case in (windowed, capped):
        for peer in ("sdpa_flash", "standard", "varlen_attn", "sdpa_padded"):
            with pytest.raises(NotImplementedError, match="this peer must have"):
                peers.PEERS[peer](problem_case)


@pytest.mark.parametrize("has_window", [True, False])
def test_varlen_attn_is_called_as_its_version_wants(has_window, monkeypatch):
    def run(q, k, v, cu_q, cu_k, max_q, max_k, causal):
        assert (max_q, max_k) == (20, 20)
        assert causal
        return ops.attention_varlen(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
            causal=True, backend="reference",
        )  # fmt: skip

    def old(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        return run(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal)

    def new(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
        return run(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size == (-1, 0))

    module = types.ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = new if has_window else old
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    problem = replace(
        SMALL, batch=2, seqlen=20, lengths=(7, 20), causal=True, peers=("varlen_attn",)
    )
    assert len(numbers(measure.measure(problem, "cpu", CEILINGS, budget()))) == 3


def test_derivatives_of_torch_agree_with_the_truth():
    for problem in tables.derivatives(TINY):
        rows = measure.measure(replace(problem, peers=("sdpa_math",)), "cpu", CEILINGS, budget())
        assert [row["op"] for row in rows if "ms" in row] == list(problem.ops), rows
        assert "TFLOP/s" not in rows[0]


def test_inputs_and_layouts_are_the_same_in_every_process():
    a, b = (case.make_case(SMALL, "cpu") for _ in range(2))
    assert torch.equal(a.q, b.q)
    assert torch.equal(a.do, b.do)
    sparse = replace(SMALL, seqlen=4096, density=0.1)
    assert torch.equal(sparse.layout(), sparse.layout())
    assert 0.05 < sparse.visible_entries() / (2 * 4096**2) < 0.15


def test_our_kernels_compile_once_and_flex_for_every_shape():
    jobs = compile_ahead.compile_jobs(attention.plan(["dense", "window"], TINY))
    of_flex = [job for job in jobs if job.peers == ("flex",)]
    ours = [job for job in jobs if job.peers == ("tilewise",)]
    assert jobs[: len(of_flex)] == of_flex  # they take longest
    assert len(of_flex) == 4 + 2
    kinds = [(job.head_dim, job.causal, job.window_left) for job in ours if len(job.ops) == 3]
    assert len(kinds) == len(set(kinds)) == 4 + 2
    assert not {peer for job in jobs for peer in job.peers} & {"sdpa_flash", "standard"}


def test_processes_that_compile_too_long_are_ended():
    problems = [replace(SMALL, seqlen=4096, batch=64)]
    assert compile_ahead.compile_ahead(problems, 4, 0.05, "cpu") == 1
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_processes_outlive_what_they_cannot_compile():
    packed = replace(SMALL, lengths=(5, 48), feature="seqlens_k")  # packed calls have none
    problems = [packed, replace(packed, head_dim=16)]
    assert compile_ahead.compile_ahead(problems, 2, 200.0, "cpu") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        {"causal": True}, {"causal": True, "window_left": 70}, {}, {"density": 0.7},
        {"causal": True, "density": 0.7},
    ],
)  # fmt: skip
def test_flex_attention_itself_agrees_with_the_truth(rule):
    problem = replace(SMALL, seqlen=256, peers=("flex",), ops=("forward",), **rule)
    rows = measure.measure(problem, "cpu", CEILINGS, budget())
    assert "ms" in rows[0], rows


def test_a_truth_of_few_rows_has_the_gradients_of_those_rows():
    drawn = case.make_case(replace(SMALL, causal=True), "cpu")
    found = truth.sample_truth(drawn)
    leaves = [t.detach().double().requires_grad_() for t in (drawn.q, drawn.k, drawn.v)]
    o = by_the_book(*leaves, causal=True)
    rows = found.rows
    grads = torch.autograd.grad(o[-1, rows], leaves, drawn.do[-1, rows].double())
    torch.testing.assert_close(found.o, o[-1, rows].detach())
    torch.testing.assert_close(found.grads["q"], grads[0][-1, rows])
    torch.testing.assert_close(found.grads["k"], grads[1][-1])
    torch.testing.assert_close(found.grads["v"], grads[2][-1])
