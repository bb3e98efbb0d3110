"""Time variants of Hopper's dropout and bias kernels in turns: one process each, one at work.

python drop_trial/trial.py --out OUT --seconds 165 ; workers: trial.py worker TREE
"""
from __future__ import annotations
import argparse, concurrent.futures as cf, json, os, re, shutil, subprocess, sys, tempfile, time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
G = "tilewise/kernels/gluon/"
BC, FT, FL, BL, BP = (G + x for x in ("backward/consumer.py", "forward/tiles.py",
    "forward/loader.py", "backward/loader.py", "backward/plan.py"))
def v(turns, ahead, stages, keys, fetch, long):
    c = lambda x: f"gl.constexpr({x})"
    return {BC: {"DRAWS_AHEAD": c(ahead)}, FT: {"DROPPING_TURNS": turns, "BIAS_KEYS": keys},
            FL: {"FETCHES_BIAS": c(fetch)}, BL: {"FETCHES_BIAS": c(fetch)}, BP: {"DROPPING_STAGES": stages, "BIAS_LONG": long}}
TREES = {
    "base": None,
    "P": v(False, 1, 3, 128, False, False),
    "Q": v(True, 2, 3, 128, True, False),
    "R": v(True, 0, 3, 64, True, True),
}
BIAS_TREES = ("base", "P", "Q", "R")
WIDE_TREES = ("base", "Q")
def trees_of(case):
    d, n, causal, feature = case
    if feature == "plain": return ("base",)
    if feature == "bias": return BIAS_TREES
    return WIDE_TREES if d == 256 else tuple(TREES)
def cases():
    for feature, widths, n in (("dropout", (64, 128, 256), 4096), ("bias", (64, 128), 4096), ("dropout", (64, 128, 256), 16384)):
        for d in widths:
            for causal in (False, True):
                yield d, n, causal, feature

if os.environ.get("TRIAL_DEVICE") == "cpu":
    TREES = {n: TREES[n] for n in ("base", "Q")}
    BIAS_TREES = WIDE_TREES = tuple(TREES)
    all_cases = cases
    def cases():
        yield from [c for c in all_cases() if c[0] == 64 and c[1] == 4096 and not c[2]]

def make_tree(name, into):
    shutil.copytree(ROOT, into, ignore=shutil.ignore_patterns(".*", "__pycache__", "docs", "drop_trial"))
    if TREES[name] is None:
        shutil.copytree(ROOT / "drop_trial/old", into, dirs_exist_ok=True)
        return
    for file, values in TREES[name].items():
        text = (into / file).read_text()
        for key, value in values.items():
            text, n = re.subn(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.M)
            assert n == 1, (file, key, n)
        (into / file).write_text(text)

def worker():
    import torch, tilewise
    held = {}
    DEV = os.environ.get("TRIAL_DEVICE", "cuda")  # "cpu": only to try this file
    cpu = DEV == "cpu"
    def prepare(d, n, causal, feature):
        held.clear()
        g = torch.Generator(DEV).manual_seed(0)
        normal = lambda *s: torch.randn(s, generator=g, device=DEV).bfloat16()
        h, total = 2048 // d, 16384
        if cpu: n, h, total = 64, 1, 64
        q, k, v_ = (normal(total // n, n, h, d).requires_grad_() for _ in range(3))
        do = normal(total // n, n, h, d)
        options = {"causal": causal}
        if feature == "dropout": options |= {"dropout_p": 0.1, "seed": 1234}
        if feature == "bias": options |= {"bias": normal(1, h, n, n)}
        held["x"] = (q, k, v_, do, options)
        held["o"] = tilewise.attention(q, k, v_, **options)
        held["grads"] = torch.autograd.grad(held["o"], (q, k, v_), do, retain_graph=True)
        cpu or torch.cuda.synchronize()
    def digest(x):
        bits = x.detach().contiguous().view(torch.int16).flatten().to(torch.int64)
        return int((bits * (torch.arange(bits.numel(), device=DEV) % 65521 + 1)).sum())
    def run(part, calls):
        q, k, v_, do, options = held["x"]
        if part == "fwd":
            with torch.no_grad():
                for _ in range(calls): tilewise.attention(q, k, v_, **options)
        else:
            for _ in range(calls): torch.autograd.grad(held["o"], (q, k, v_), do, retain_graph=True)
    def timed(part, calls):
        run(part, 1)
        if cpu: return 1.0
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record(); run(part, calls); b.record(); b.synchronize()
        return a.elapsed_time(b) / calls
    print(json.dumps({"file": tilewise.__file__, "torch": torch.__version__, "device": "cpu" if cpu else torch.cuda.get_device_name()}), flush=True)
    for line in sys.stdin:
        try:
            ask = json.loads(line)
            if ask[0] == "prepare": prepare(*ask[1]); r = True
            elif ask[0] == "time": r = timed(*ask[1:])
            elif ask[0] == "digest": r = [digest(x) for x in (held["o"], *held["grads"])] + [float(x.detach().float().abs().sum()) for x in (held["o"], *held["grads"])]
            elif ask[0] == "save":
                r = True; torch.save([x.detach().cpu() for x in (held["o"], *held["grads"])], ask[1])
            elif ask[0] == "compare":
                other = torch.load(ask[1])
                r = [float(((a.detach().float() - b.cuda().float()).norm() / b.cuda().float().norm())) for a, b in zip((held["o"], *held["grads"]), other)]
            elif ask[0] == "drop": held.clear(); cpu or torch.cuda.empty_cache(); r = True
        except Exception as e:
            r = {"error": repr(e)[-600:]}
        print(json.dumps(r), flush=True)

class Worker:
    def __init__(self, tree, log):
        self.p = subprocess.Popen([sys.executable, str(ROOT / "drop_trial/trial.py"), "worker"], cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(log, "w"), text=True)
        self.hello = None
    def ask(self, *what):
        if self.hello is None: self.hello = json.loads(self.p.stdout.readline())
        self.p.stdin.write(json.dumps(what) + "\n"); self.p.stdin.flush()
        line = self.p.stdout.readline()
        return json.loads(line) if line else {"error": "worker died"}
    def end(self):
        self.p.stdin.close(); self.p.wait()

def main():
    o = argparse.ArgumentParser(); o.add_argument("--out", type=Path, required=True); o.add_argument("--seconds", type=float, default=165)
    o.add_argument("--compile-seconds", type=float, default=85); o.add_argument("--rounds", type=int, default=3)
    o = o.parse_args(); began = time.monotonic(); left = lambda: o.seconds - (time.monotonic() - began)
    o.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="drop-") as tmp:
        os.environ["TRITON_CACHE_DIR"] = tmp + "/cache"
        trees = {n: Path(tmp) / n for n in TREES}
        for n, t in trees.items(): make_tree(n, t)
        # Compile side by side: a process for each tree and kind of case.
        jobs = {}
        for case in cases():
            d, n, causal, feature = case
            for tree in trees_of(case): jobs.setdefault((tree, d, causal, feature), []).append(case)
            if feature == "dropout": jobs.setdefault(("base", d, causal, "plain"), []).append((d, n, causal, "plain"))
        def warm(job):
            name = "-".join(map(str, job)); w = Worker(trees[job[0]], o.out / f"warm-{name}.log")
            try: found = [w.ask("prepare", c) for c in jobs[job]]
            finally: w.end()
            return job, found
        workers = {n: Worker(t, o.out / f"{n}.log") for n, t in trees.items()}
        _plain.append(Worker(trees["base"], o.out / "plain.log"))
        failed = []
        with cf.ThreadPoolExecutor(os.cpu_count()) as pool:
            order = sorted(jobs, key=lambda j: (j[3] == "bias", j[1] == 256))
            for job, found in pool.map(warm, order):
                failed += [(job, f) for f in found if f is not True]
        print(f"compiled {len(jobs)} jobs in {time.monotonic() - began:.0f} s; failed: {failed}", flush=True)
        results = {}
        def write():
            (o.out / "drop_trial.json").write_text(json.dumps({"hello": {n: w.hello for n, w in workers.items()}, "trees": TREES, "ms": results, "checks": checks, "failed": failed}, indent=1))
        checks = {}
        for case in cases():
            if left() < 8: print("# out of time before", case); break
            d, n, causal, feature = case
            key = f"d{d} n{n} {'causal' if causal else 'full'} {feature}"
            names = [("plain", "base")] + [(t, t) for t in trees_of(case)]
            times = {}
            # plain beside the others: base holds two cases in turn, so it is asked anew
            who = [t for t in trees_of(case)]
            for t in who:
                r = workers[t].ask("prepare", case)
                if r is not True: print("#", key, t, r); continue
            ref = None
            for t in who:
                r = workers[t].ask("digest"); ref = ref or r
                if isinstance(r, list) and isinstance(ref, list):
                    same = "".join(x if a == b else "-" for x, a, b in zip("oqkv", r, ref))
                    far = max(abs(a / b - 1) for a, b in zip(r[4:], ref[4:]))
                    checks[f"{key} {t}"] = [same, far]
                else: checks[f"{key} {t}"] = [str(r), 1]
            plain = Plain(workers, trees, o.out)
            plain.ask("prepare", [d, n, causal, "plain"])
            for part in ("fwd", "bwd"):
                calls = 6 if part == "fwd" and n == 4096 else 3
                for _ in range(o.rounds):
                    for name, w in [("plain", plain), *[(t, workers[t]) for t in who]]:
                        r = w.ask("time", part, calls)
                        times.setdefault((name, part), []).append(r if isinstance(r, float) else float("nan"))
            for (name, part), xs in times.items(): results[f"{key} {part} {name}"] = xs
            med = {k: sorted(x)[len(x) // 2] for k, x in times.items()}
            print(key, "plain", f"{med['plain', 'fwd']:.3f} {med['plain', 'bwd']:.3f}", *[
                f"| {t} {med['plain', 'fwd'] / med[t, 'fwd']:.2f} {med['plain', 'bwd'] / med[t, 'bwd']:.2f} {checks[f'{key} {t}'][0]} {checks[f'{key} {t}'][1]:.0e}" for t in who], flush=True)
            for w in [*(workers[t] for t in who), plain]: w.ask("drop")
            write()
        for w in [*workers.values(), *_plain]: w.end()
        write()
        print(f"# done in {time.monotonic() - began:.0f} s", flush=True)

_plain = []
def Plain(workers, trees, out):
    if not _plain:
        raise RuntimeError
    return _plain[0]

if __name__ == "__main__":
    worker() if sys.argv[1:2] == ["worker"] else main()
