"""Prompts with shared beginnings over several replicas: by prefix, and in turn.

    python lab/routing.py --json lab/results/routing_cpu.json       needs tilewise[ray]

Replicas of the packaged model on a Ray cluster of this machine. Every prompt begins with one of
some documents and ends with a question of its own; one replica's cache holds a part of the
documents only. Counts (tokens computed, tokens found) hardly depend on what else the machine does;
times do, so that the two ways take turns. The load averages before and after are in the JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tilewise.bench.report import emit, format_table, say, write

Row = dict[str, Any]
COLUMNS = ["routing", "turn", "requests", "computed", "found", "found %", "tok/s", "ttft p50",
           "ttft p90", "busiest"]  # fmt: skip
SETTINGS = {"block_size": 16, "max_num_seqs": 16, "shutdown_timeout": 60.0}
# Ray's own limits are for machines that do nothing else.
PATIENT = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_USAGE_STATS_ENABLED": "0",
}
COUNTS = ("prefix_cache_queries", "prefix_cache_hits")


def ask(port: int, prompt: list[int], tokens: int, to: str | None) -> tuple[float, float, str]:
    """Stream one answer; return the seconds to its first token and its last, and who gave it.

    Args:
        to: the replica; None is whom the gateway chooses.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
            "ignore_eos": True}  # fmt: skip
    began, first = time.perf_counter(), 0.0
    headers = {} if to is None else {"x-tilewise-replica": to}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"a request must be served, got {answer.status}: {answer.read()!r}")
    name = answer.getheader("x-tilewise-replica") or ""
    while line := answer.readline():
        if line.startswith(b"data:") and not first:
            first = time.perf_counter() - began
        if b'"error"' in line:
            raise RuntimeError(f"a stream must be whole, got {line!r}")
    connection.close()
    return first, time.perf_counter() - began, name


def counts(port: int) -> dict[str, float]:
    """Return the sums of counters over all replicas."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {
        name: sum(map(float, re.findall(rf"^tilewise:{name}(?:_total)?{{.*?}} (\S+)$", text, re.M)))
        for name in COUNTS
    }


def post(port: int, path: str) -> Any:
    """Ask all replicas for something and return what each says, by name."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET" if path == "/v1/usage" else "POST", path)
    told = json.loads(connection.getresponse().read())
    connection.close()
    return told["replicas"]


def turn(port: int, options: argparse.Namespace, routing: str, seed: int) -> Row:
    """Ask all questions, so many at a time, and return what it took.

    In turn is by name, past the router; the documents are new, and so nowhere kept.
    """
    post(port, "/reset_prefix_cache")
    places: list[str | None] = [None]
    if routing == "round-robin":
        places = [*post(port, "/v1/usage")]
    draw = random.Random(seed)
    documents = [
        [draw.randrange(3, 4000) for _ in range(options.document)] for _ in range(options.documents)
    ]
    prompts = [
        [*draw.choice(documents), *(draw.randrange(3, 4000) for _ in range(options.question))]
        for _ in range(options.requests)
    ]
    before, began = counts(port), time.perf_counter()
    with ThreadPoolExecutor(options.at_once) as pool:
        jobs = [
            pool.submit(ask, port, prompt, options.answer, places[i % len(places)])
            for i, prompt in enumerate(prompts)
        ]
        told = [job.result() for job in jobs]
    seconds = time.perf_counter() - began
    after = counts(port)
    queries, found = (after[name] - before[name] for name in COUNTS)
    first = sorted(t for t, _, _ in told)
    names = [name for _, _, name in told]
    return {
        "requests": len(told), "computed": int(queries - found), "found": int(found),
        "found %": 100 * found / queries,
        "tok/s": len(told) * options.answer / seconds, "seconds": seconds,
        "ttft p50": statistics.median(first), "ttft p90": first[int(0.9 * (len(first) - 1))],
        "busiest": max(map(names.count, names)) * options.replicas / len(names),
    }  # fmt: skip


def main() -> int:
    """Run both ways in turns and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--replicas", type=int, default=3)
    add("--requests", type=int, default=180, help="of a turn")
    add("--documents", type=int, default=18, help="that prompts begin with")
    add("--document", type=int, default=600, help="tokens of each")
    add("--question", type=int, default=24, help="tokens of a prompt's own")
    add("--answer", type=int, default=8, help="tokens")
    add("--at-once", type=int, default=6, help="requests")
    add("--blocks", type=int, default=400, help="of 16 tokens, of each replica's cache")
    add("--turns", type=int, default=2)
    add("--json", metavar="FILE")
    options = parser.parse_args()
    os.environ.update(PATIENT)
    import ray
    from ray import serve

    from tilewise.cluster.application import APP, serve_app

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    rows: list[Row] = []
    document = vars(options) | {
        "what": "prompts with shared beginnings over replicas of the packaged model",
        "cores": os.cpu_count(),
        "load before": os.getloadavg(),
        "rows": rows,
    }
    ray.init("local", num_cpus=options.replicas + 1, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    try:
        app = serve_app(
            "story", replicas=options.replicas, num_cpus=0.5, num_blocks=options.blocks, **SETTINGS
        )
        serve.run(app, name=APP, route_prefix="/")
        for number in range(options.turns):
            for routing in ("prefix", "round-robin"):
                seed = 2 * number + (routing == "prefix")
                row = {"routing": routing, "turn": number} | turn(port, options, routing, seed)
                rows.append(row)
                say(", ".join(f"{name} {value}" for name, value in row.items()))
                document["load after"] = os.getloadavg()
                if options.json:
                    write(document, options.json)
    finally:
        threading.Thread(target=serve.shutdown, daemon=True).start()
        time.sleep(5)
        ray.shutdown()
    print(format_table(rows, COLUMNS))
    emit(document, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
