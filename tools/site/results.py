"""Write the pages of results and the five rows of README.md from the committed results.

python -m tools.site.results

A subject is shown from one file of `lab/results`, the newest of its kind that has the peers, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tools.site import libraries
from tools.site.marks import ROOT, begin, replaced, table, write
from tools.site.numbers import load, number, pair

PAGE = ROOT / "docs" / "results" / "README.md"
README = ROOT / "README.md"
ROWS = begin("five rows", "results")
HEAD = """# Results

Every number on this page is read from a committed file of [lab/results](../../lab/results), the
newest of its subject, by `python -m tools.site.results`. In a table all columns are of one run on
one machine, unless its text says otherwise, and a number is the median of its repeats. How a
subject is measured and why it is as fast as it is, is told by the page that its text names.

Attention on a Hopper GPU beside FlashAttention-4, FlashAttention-3, cuDNN, FlexAttention and
FlashMLA, row by row: [attention beside other libraries](libraries.md).

"""
Row = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A table of the page.

    Attributes:
        title: heading of the table.
        file: name of the result's file, without its suffix.
        date: day of the measurement, where the file does not have it.
        device: name of the device, where the file does not have it.
        again: command that measures it again.
        told: page that explains it, from docs/results.
        text: sentence about what was measured, with units.
        rows: function from the file's content to head and rows.
    """

    title: str
    file: str
    date: str
    device: str
    again: str
    told: str
    text: str
    rows: Callable[[Any], tuple[list[str], list[list[object]]]]


def pick(rows: Iterable[Row], **asked: object) -> Row:
    """Return the only row with these values."""
    (found,) = [row for row in rows if all(row.get(k) == v for k, v in asked.items())]
    return found


def _tflops(row: Row) -> float:
    return float(row["TFLOP/s"])


def _wide(data: Any) -> tuple[list[str], list[list[object]]]:
    rows = data["rows"]
    lengths = sorted({row["n"] for row in rows})
    found = []
    for d in sorted({row["head_dim"] for row in rows}, reverse=True):
        for backend in sorted({row["backend"] for row in rows if row["head_dim"] == d}):
            here = [r for r in rows if (r["head_dim"], r["backend"]) == (d, backend)]
            by = {(r["n"], r["causal"]): r["tflops"] for r in here}
            found.append(
                [f"D {d}, backend {backend}", *(pair((by[n, False], by[n, True])) for n in lengths)]
            )
    return ["TFLOP/s, full / causal", *(f"N {n:,}" for n in lengths)], found


def _bytes(data: Any) -> tuple[list[str], list[list[object]]]:
    rows = data["rows"]
    shapes = sorted({(row["D"], row["N"]) for row in rows})
    names = {"tilewise": "bfloat16", "tilewise_fp8_kernel": "e4m3, the kernel",
             "tilewise_fp8": "e4m3, with the conversion of q, k, v"}  # fmt: skip
    found = [
        [name, *(pair(_tflops(pick(rows, peer=p, D=d, N=n, causal=c)) for c in (False, True))
                 for d, n in shapes)]
        for p, name in names.items()
    ]  # fmt: skip
    return ["TFLOP/s, full / causal", *(f"D {d}, N {n:,}" for d, n in shapes)], found


def _mma(data: Any) -> tuple[list[str], list[list[object]]]:
    found = []
    for shape, passes in data["TFLOP/s"].items():
        if ("N 4096" in shape or "N 16384" in shape) and "FlashAttention-2" in passes["forward"]:
            cells: list[object] = [shape]
            for op in ("forward", "backward"):
                cells.append(
                    pair(passes[op].get(x) for x in ("tilewise", "FlashAttention-2"))
                    if op in passes
                    else "-"
                )
            found.append(cells)
    return ["shape", "forward, tilewise / FlashAttention-2", "backward"], found


def _on_cpu(data: Any) -> tuple[list[str], list[list[object]]]:
    rows, found = [r for r in data["rows"] if r["table"] == "dense"], []
    for d in (64, 128):
        for n in (1024, 4096, 16384):
            for causal in (False, True):
                here = [r for r in rows if (r["D"], r["N"], r["causal"]) == (d, n, causal)]
                cells: list[object] = [f"D {d}, N {n:,}, {'causal' if causal else 'full'}"]
                for op in ("forward", "backward"):
                    of_op = [r for r in here if r["op"] == op and r.get("ms")]
                    ours = [r["ms"] for r in of_op if r["peer"] == "tilewise"]
                    sdpa = [r["ms"] for r in of_op if r["peer"].startswith("sdpa")]
                    cells += [number(min(ours)), number(min(sdpa))]
                found.append(cells)
    head = ["call", "forward, ms", "SDPA, its best", "backward, ms", "SDPA, its best"]
    return head, found


def _decode_on_cpu(data: Any) -> tuple[list[str], list[list[object]]]:
    return ["call", "library", "ms"], [
        [r["case"], r["peer"].replace("_", " "), number(r["ms"])] for r in data["rows"]
    ]


def _shared(data: Any) -> tuple[list[str], list[list[object]]]:
    rows, found = [r for r in data["rows"] if r["op"] == "decode"], []
    for b, prefix in dict.fromkeys((r["B"], r["prefix"]) for r in rows):
        ms = {r["peer"]: r["ms"] for r in rows if (r["B"], r["prefix"]) == (b, prefix)}
        found.append([f"{b} sequences, {prefix:,} shared tokens",
                      *(number(ms[p]) for p in ("tilewise_shared", "tilewise",
                                                "sdpa_contiguous"))])  # fmt: skip
    return ["call", "shared, ms", "not shared, ms", "SDPA, contiguous keys, ms"], found


def _training(data: Any) -> tuple[list[str], list[list[object]]]:
    rows = [row for row in data["rows"] if "tokens/s" in row]
    names = {"ours": "tilewise's model and loss", "tilewise": "transformers on tilewise",
             "sdpa": "transformers with SDPA", "eager": "transformers, eager"}  # fmt: skip
    order = list(dict.fromkeys((r["shape"], r["N"], r["B"]) for r in rows))
    rows = sorted(rows, key=lambda r: (order.index((r["shape"], r["N"], r["B"])),
                                       -r["tokens/s"]))  # fmt: skip
    return ["model, batch x tokens", "way", "tokens/s", "GiB"], [
        [f"{r['shape']}, {r['B']} x {r['N']:,}", names[r["way"]], number(r["tokens/s"]),
         number(r["GiB"])] for r in rows
    ]  # fmt: skip


def _engine(data: Any) -> tuple[list[str], list[list[object]]]:
    found, names = [], {"tilewise": "tilewise", "vllm": "vLLM 0.25.1"}
    for row in sorted(data["rows"], key=lambda r: (r["workload"], r["batch"])):
        if row["workload"] == "fixed":
            found.append([f"batch {row['batch']}", names[row["engine"]],
                          number(row["prefill tok/s"]), number(row["ms a step"]),
                          number(row["decode tok/s"])])  # fmt: skip
        else:
            found.append(["nano-vllm's 256 requests", names[row["engine"]], "", "",
                          number(row["output tok/s"])])  # fmt: skip
    return ["workload", "engine", "prompts, tokens/s", "a step, ms", "decoded tokens/s"], found


def _steady(data: Any) -> tuple[list[str], list[list[object]]]:
    return ["sequences", "a step, ms", "of the roof", "GPU busy"], [
        [r["rows"], number(r["step"][1]), f"{r['% of roof']:.0f} %", f"{r['busy %']:.0f} %"]
        for r in data["rows"]
        if r["tree"] == "this"
    ]


def _samples(data: Any) -> tuple[list[str], list[list[object]]]:
    (row,) = data["rows"]
    return ["workload", "tokens/s"], [
        [f"{row['n']:,} samples each of {row['batch']} prompts",
         number(row["output tok/s"])]
    ]  # fmt: skip


def _engine_on_cpu(data: Any) -> tuple[list[str], list[list[object]]]:
    rows = [r for r in data["rows"] if r["threads"] == 2]
    names = {"tilewise": "tilewise", "llamacpp bf16": "llama.cpp, bf16",
             "llamacpp f16": "llama.cpp, f16", "transformers": "transformers"}  # fmt: skip
    batches = sorted({r["batch"] for r in rows})
    found = []
    for engine, name in names.items():
        here = [r for r in rows if r["engine"] == engine]
        decode = {r["batch"]: r["decode tok/s"] for r in here if r.get("decode tok/s")}
        (prompt,) = [r["prefill tok/s"] for r in here if r["prompt"] == 512]
        found.append([name, *(number(decode[b]) for b in batches), number(prompt)])
    head = ["engine", *(f"batch {b}, decoded tokens/s" for b in batches), "a prompt of 512"]
    return head, found


def _narrow_on_cpu(data: Any) -> tuple[list[str], list[list[object]]]:
    found = []
    for model in dict.fromkeys(r["model"] for r in data["rows"]):
        for engine in ("tilewise", "llama.cpp"):
            here = [r for r in data["rows"] if (r["model"], r["engine"]) == (model, engine)]
            ms = {r["batch"]: r["ms a step"] for r in here if "batch" in r}
            (prompt,) = [r["tok/s"] for r in here if "prompt" in r]
            found.append([f"`{model}`", engine, *(number(ms[b]) for b in (1, 8, 32)),
                          number(prompt)])  # fmt: skip
    return ["file", "engine", *(f"batch {b}, ms a step" for b in (1, 8, 32)),
            "a prompt of 512, tokens/s"], found  # fmt: skip


def _narrow(data: Any) -> tuple[list[str], list[list[object]]]:
    rows, found = data["engine"], []
    for model in dict.fromkeys(r["model"] for r in rows):
        for weights in dict.fromkeys(r["weights"] for r in rows):
            ms = {r["rows"]: r["ms_a_step"] for r in rows
                  if (r["model"], r["weights"]) == (model, weights)}  # fmt: skip
            found.append([model, weights, *(number(ms.get(b)) for b in (1, 32, 256))])
    return ["model", "weights", *(f"batch {b}, ms a step" for b in (1, 32, 256))], found


def _server(data: Any) -> tuple[list[str], list[list[object]]]:
    found = []
    for name, server in (("tilewise serve", "tilewise"), ("vllm serve", "vllm")):
        most, (rate,) = data["servers"][server]["most"], data["servers"][server]["rate"]
        found.append(
            [f"`{name}`", number(most["tokens_per_second"]),
             pair((rate["ttft"]["p50"], rate["ttft"]["p99"])),
             pair((rate["itl"]["p50"], rate["itl"]["p99"]))]
        )  # fmt: skip
    return ["server", "256 requests at once, tokens/s", "first token, ms, p50 / p99",
            "between two events, ms, p50 / p99"], found  # fmt: skip


def _in_vllm(data: Any) -> tuple[list[str], list[list[object]]]:
    names = {"graphs": "CUDA graphs", "compiled": "torch.compile, too"}
    found = {}
    for r in data["rates"]:
        case = (f"{r['shape']}, {r['rows']} x {r['length']:,}", names[r["mode"]])
        found.setdefault(case, {})[r["backend"]] = r
    rows: list[list[object]] = [
        [*case, *[number(of[backend][key]) for key in ("prompt_tokens_s", "decode_tokens_s")
                  for backend in ("FLASH_ATTN", "CUSTOM")]]
        for case, of in found.items()
    ]  # fmt: skip
    return ["shape, prompts", "with", "prompt tokens/s, FlashAttention-3", "ours",
            "decode tokens/s, FlashAttention-3", "ours"], rows  # fmt: skip


def _start(data: Any) -> tuple[list[str], list[list[object]]]:
    names = {"cold": "nothing compiled before", "warm": "all compiled before"}
    return ["start", "processes that compile", "whole process, s"], [
        [names[r["start"]], r["processes"] or "none beside it", number(r["process"])]
        for r in data["rows"]
    ]


def _ranks(data: Any) -> tuple[list[str], list[list[object]]]:
    found = []
    one = {r["batch"]: r["ms"] for r in load("shard_steps_h200")["rows"] if r["ranks"] == 1}
    for batch in sorted(one):
        cells: list[object] = [f"batch {batch}", number(one[batch])]
        for ranks in (2, 4):
            here = [r["ms"] for r in data["rows"] if (r["ranks"], r["batch"]) == (ranks, batch)]
            cells.append(number(min(here) if here else None))
        found.append(cells)
    return ["decode step", "1 GPU, ms", "2 GPUs, ms", "4 GPUs, ms"], found


def _sequence(data: Any) -> tuple[list[str], list[list[object]]]:
    found = []
    for part in ("four", "million"):
        for r in data[part]["rows"]:
            if "forward ms" in r or "forward s" in r:
                forward, backward = r["forward s"], r.get("backward s")
                name = "torch's context_parallel" if r["method"] == "torch" else r["method"]
                found.append([f"{r['ranks']} GPUs, {r['tokens a rank']:,} tokens each", name,
                              number(1e3 * forward), number(backward and 1e3 * backward),
                              number(r["GiB a rank"])])  # fmt: skip
    return ["sequence", "way", "forward, ms", "backward, ms", "GiB a GPU"], found


def _waste(data: Any) -> tuple[list[str], list[list[object]]]:
    names = {"max": "contiguous, by the longest answer", "pow2": "contiguous, powers of two",
             "oracle": "contiguous, the length known", "paged": "blocks of 16"}  # fmt: skip
    found = []
    for trace in data["traces"]:
        for r in trace["rows"]:
            if r["block"] in (None, 16):
                found.append([trace["trace"], names[r["allocator"]], f"{r['tokens']:.0f} %",
                              number(r["batch"])])  # fmt: skip
    return ["trace", "allocator", "of the memory holds tokens", "requests at once"], found


def _evoformer(data: Any) -> tuple[list[str], list[list[object]]]:
    peers = ("tilewise", "sdpa", "eager")
    found = [
        [f"{r['tokens']:,} rows of {r['tokens']:,} tokens, {r['heads']} heads",
         *(pair(r["ms"][part].get(peer) for peer in peers) for part in ("forward", "both"))]
        for r in sorted(data["rows"], key=lambda r: (r["heads"], r["tokens"]))
    ]  # fmt: skip
    return ["call", "forward, ms", "forward and backward, ms"], found


SUBJECTS = (
    Subject("Heads of 320 and 512 channels", "wide_h200", "", "",
            "python lab/hopper.py --only wide", "hopper.md",
            "Forward pass, bfloat16, 16,384 tokens.", _wide),
    Subject("Attention in 8 bits", "fp8_planned_h200", "2026-11-27", "NVIDIA H200",
            "tilewise bench attention --device cuda", "fp8.md", "Forward pass.", _bytes),
    Subject("GPUs other than Hopper", "ampere_sm89_h200", "2026-11-29", "NVIDIA H200, as sm_89",
            "python lab/ampere.py", "../design/ampere.md",
            "Kernels of sm_89 in 99 KiB of shared memory, run on an H200; TFLOP/s.", _mma),
    Subject("Attention on a CPU", "attention_cpu", "2026-11-22", "Intel Xeon with AMX, 2 threads",
            "tilewise bench attention --device cpu", "attention.md",
            "bfloat16, 256 channels in all.", _on_cpu),
    Subject("Prefixes that sequences share", "cascade_h200", "2026-11-22", "NVIDIA H200",
            "python lab/cascade.py", "../guide/paged.md",
            "One new token each, 32 heads on 8, 256 tokens of their own.", _shared),
    Subject("AlphaFold's attention", "evoformer_h200", "2026-11-30", "NVIDIA H200",
            "python lab/evoformer.py", "../guide/integrations.md",
            "bfloat16, 32 channels a head, a mask and a pair bias with its gradient: tilewise / "
            "torch's fused kernels over the sum of both biases / the formula in torch. A dash: "
            "out of memory.", _evoformer),
    Subject("Training on an H200", "train_h200_rows", "2026-11-24", "NVIDIA H200",
            "tilewise bench train", "training.md",
            "Whole steps with optimiser, bfloat16.", _training),
    Subject("The engine beside vLLM, Qwen3-0.6B", "engine_h200_landed_qwen", "2026-11-23",
            "NVIDIA H200",
            "tilewise bench engine --shape qwen3-0.6b --workload fixed nano --peers vllm",
            "engine.md",
            "Random weights, bfloat16, prompts of 1,024 tokens, 128 new ones.", _engine),
    Subject("The engine beside vLLM, Llama-3-8B", "engine_h200_llama_vllm", "2026-11-24",
            "NVIDIA H200",
            "tilewise bench engine --shape llama-3-8b --workload fixed nano --peers vllm",
            "engine.md", "The same.", _engine),
    Subject("A steady decode", "steady_one_row_h200", "2026-11-29", "NVIDIA H200",
            "python lab/steady_decode.py", "engine.md",
            "Qwen3-0.6B's shape, 1,024 tokens of context; the roof is the time of reading weights "
            "and keys at the rate of that card.", _steady),
    Subject("Many samples of a prompt", "engine_h200_samples", "2026-11-23", "NVIDIA H200",
            "tilewise bench engine --shape llama-1b --workload samples",
            "engine.md",
            "Llama-3.2-1B's shape, random weights, 128 tokens a sample.", _samples),
    Subject("The engine on a CPU, the packaged model", "engine_cpu", "2026-11-23", "",
            "tilewise bench engine", "../design/cpu-engine.md",
            "7.7 M parameters, bfloat16, two cores.",
            _engine_on_cpu),
    Subject("The engine on a CPU, a Llama of 0.39 B", "engine_cpu_llama", "2026-11-23", "",
            "tilewise bench engine --shape llama-0.4b", "../design/cpu-engine.md", "The same.",
            _engine_on_cpu),
    Subject("Quantised models on a CPU", "quantised_cpu", "2026-11-29", "",
            "python lab/quantised_cpu.py", "weights.md", "GGUF files, two cores.",
            _narrow_on_cpu),
    Subject("Quantised models on an H200", "quantised_h200", "", "", "tilewise bench engine --help",
            "weights.md",
            "Decode steps of the whole engine, random weights, prompts of 32 tokens.", _narrow),
    Subject("The server beside vLLM's", "serve_vllm_h200", "", "", "python lab/serve_peers.py",
            "serve.md",
            "Qwen3-0.6B's shape, nano-vllm's 256 requests; times at 24.3 requests a second.",
            _server),
    Subject("vLLM with our attention beside its own", "vllm_backend_h200", "", "",
            "python lab/vllm_backend.py", "../guide/integrations.md",
            "vLLM 0.25.1, random weights, bfloat16, 128 new tokens, the fastest of three turns.",
            _in_vllm),
    Subject("A start", "cold_start_h200", "", "", "python lab/cold_start.py", "../design/engine.md",
            "From the start of Python to a ready engine, Qwen3-0.6B's shape.", _start),
    Subject("One model on several GPUs", "shard_engine_h200", "2026-11-27", "NVIDIA H200",
            "python lab/shard_engine.py", "several-gpus.md",
            "Llama-3-8B's shape, 1,024 tokens of context; one GPU is the captured step alone, by "
            "`lab/shard_steps.py`.", _ranks),
    Subject("One sequence on several GPUs", "context_h100", "", "NVIDIA H100",
            "python lab/context.py", "several-gpus.md",
            "Causal, D 128, 64 heads on 8; from 65,536 tokens a GPU on 32 heads on 8.", _sequence),
    Subject("What the memory of a cache holds", "waste", "2026-11-22",
            "Simulated, so the same on every machine",
            "tilewise bench waste", "paged-memory.md",
            "Requests of two public traces, replayed through the scheduler.", _waste),
)  # fmt: skip


def _mean_ratios(file: str, peer: str) -> list[str]:
    """Return how many times as fast as a peer attention is, forward and backward."""
    rows = [r for r in load(file)["rows"] if r["table"] == "dense"]
    return libraries.ratio(libraries.by_shape(rows), peer).split(" / ")


def page() -> str:
    """Return the page of all results."""
    parts = [HEAD]
    for subject in SUBJECTS:
        data = load(subject.file)
        date = data.get("date") or subject.date
        name = data.get("device")
        name = subject.device or (name if name != "cpu" else "")
        name = name or data.get("ceilings", {}).get("name", "")
        where = ", ".join(x for x in (name, date) if x)
        parts.append(
            f"## {subject.title}\n\n{subject.text} {where}; "
            f"[file](../../lab/results/{subject.file}.json), again by `{subject.again}`, "
            f"[explained]({subject.told}).\n\n" + table(*subject.rows(data)) + "\n"
        )
    return "".join(parts).rstrip("\n") + "\n"


def _five() -> list[list[str]]:
    cpu = [r for r in load("attention_cpu")["rows"] if r["table"] == "dense"]
    here = [r for r in cpu if (r["D"], r["N"], r["causal"]) == (64, 4096, False)]
    ms = {
        (op, who): min(
            r["ms"] for r in here
            if r["op"] == op and r.get("ms") and r["peer"].startswith(who)
        )
        for op in ("forward", "backward") for who in ("tilewise", "sdpa")
    }  # fmt: skip
    cpu = [r for r in load("engine_cpu")["rows"] if r["threads"] == 2]
    rate = {
        who: [max(r["decode tok/s"] for r in cpu
                  if r["engine"].startswith(who) and r["batch"] == b and r.get("decode tok/s"))
              for b in (1, 32)]
        for who in ("tilewise", "llamacpp")
    }  # fmt: skip
    waste = [r for trace in load("waste")["traces"] for r in trace["rows"]]
    blocks = [r["tokens"] for r in waste if r["block"] == 16]
    whole = [r["tokens"] for r in waste if r["block"] is None]
    fa4, cudnn = (_mean_ratios("libraries_h200", peer) for peer in ("fa4", "sdpa_cudnn"))
    served = load("serve_vllm_h200")["servers"]
    most = {who: served[who]["most"]["tokens_per_second"] for who in ("tilewise", "vllm")}
    return [
        ["attention on 2 CPU cores with AMX, bf16, N 4,096, D 64, forward / backward",
         pair((ms["forward", "tilewise"], ms["backward", "tilewise"]), 2) + " ms",
         f"torch SDPA {pair((ms['forward', 'sdpa'], ms['backward', 'sdpa']), 2)}",
         "`tilewise bench attention --device cpu`"],
        ["the packaged model on the same cores, batch 1 / 32",
         pair(rate["tilewise"]) + " tokens/s", f"llama.cpp, f16: {pair(rate['llamacpp'])}",
         "`tilewise bench engine --batch 1 32 --peers llamacpp`"],
        ["share of cache memory that holds tokens, simulated on Azure's two traces of 2023",
         f"{min(blocks):.0f} to {max(blocks):.0f} %",
         f"contiguous allocation {min(whole):.0f} to {max(whole):.0f} %",
         "`tilewise bench waste --trace FILE`"],
        ["attention on an H200, bf16, D 64 to 256, N 1,024 to 16,384, mean of 18 shapes",
         f"forward {fa4[0]} x FlashAttention-4, {cudnn[0]} x cuDNN; "
         f"backward {fa4[1]} x FlashAttention-4, {cudnn[1]} x cuDNN",
         "[row by row, with FlashAttention-3 and FlexAttention](docs/results/libraries.md)",
         "`python lab/hopper.py --only dense`"],
        ["a server on an H200, Qwen3-0.6B's shape with random weights, 256 requests at once, "
         "the better of two turns",
         f"{number(most['tilewise'])} tokens/s", f"vLLM 0.25.1 {number(most['vllm'])}",
         "`python lab/serve_peers.py --peer-path vllm=FOLDER`"],
    ]  # fmt: skip


def five(readme: str) -> str:
    """Return README.md with its five rows written anew."""
    head = ["what", "tilewise", "beside it, in the same run", "check it with"]
    return replaced(readme, ROWS, table(head, _five()))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    libraries.PAGE.write_text(libraries.page(), encoding="utf-8")
    write(README, five)
