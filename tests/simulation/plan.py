"""What a seed says: the sizes of an engine, its clients, and what goes wrong, as data.

Each client and each event has random numbers of its own, so that one can be taken away and all
others stay what they are: that is how a plan that fails is made small.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulation.engine import random_of

MAX_MODEL_LEN = 48
POISON = 299  # the first token of a prompt that breaks every step it is in
BEHAVIOURS = ("stays", "cuts", "half-closes", "reads slowly", "stalls", "cuts while sending")


@dataclass(frozen=True)
class Client:
    """One connection, and the requests that are sent over it one after another.

    Attributes:
        name: the client's name, which decides its random numbers.
        at: seconds from the start.
        bodies: the JSON of each request.
        does: one of BEHAVIOURS.
        seconds: the time after which it does that.
        pace: seconds that a piece of bytes takes on average.
    """

    name: str
    at: float
    bodies: tuple[dict[str, Any], ...]
    does: str = "stays"
    seconds: float = 0.0
    pace: float = 1e-3


@dataclass(frozen=True)
class Event:
    """Something that happens to the server or its engine.

    Attributes:
        at: seconds from the start.
        kind: see `world.World`.
        number: how often, how long, or of which rank.
    """

    at: float
    kind: str
    number: float = 1.0


@dataclass(frozen=True)
class Plan:
    """All of a simulation but the order of what is at once, which the seed's delays decide."""

    seed: int
    settings: dict[str, Any]
    clients: tuple[Client, ...]
    events: tuple[Event, ...] = ()
    process: bool = False
    num_ranks: int = 1
    step_s: float = 0.01
    chances: dict[str, float] = field(default_factory=dict)

    def kinds(self) -> set[str]:
        """The kinds of events."""
        return {event.kind for event in self.events}


def plan_of(seed: int) -> Plan:
    """Return the plan of a seed."""
    rng = random_of("plan", seed)
    num_ranks = rng.choice([1, 1, 1, 2, 3])
    process = num_ranks == 1 and rng.random() < 0.4
    room = rng.choice([0, 2, 6, 30])
    block_size = rng.choice([2, 3, 4, 8])
    one = MAX_MODEL_LEN // block_size + 1  # blocks with which one long sequence makes others wait
    settings = {
        "num_blocks": rng.choice([6, 9, 13, 30, one, one, one]),
        "block_size": block_size,
        "max_num_seqs": rng.choice([1, 3, 8, 8]),
        "max_num_batched_tokens": rng.choice([8, 16, 64]),
        "max_model_len": MAX_MODEL_LEN,
        "long_prefill_token_threshold": rng.choice([None, None, 1, 7]),
        "enable_prefix_caching": rng.random() < 0.8,
        "scheduling_policy": rng.choice(["fcfs", "fcfs", "priority", "fair"]),
        "preemption": rng.choice(["auto", "recompute", "swap"]) if room else "auto",
        "victim": rng.choice(["newest", "cheapest"]),
        "num_swap_blocks": room,
        "max_waiting_requests": rng.choice([None, None, None, 2]),
        "overlap": rng.random() < 0.6,
        "has_files": bool(room) and num_ranks == 1 and rng.random() < 0.5,
        "audit": rng.choice([0.0, 0.0, 0.5, 1.0]),
        "slow_reader_s": 3.0,
        "high": rng.choice([256, 64 * 2**10]),
    }
    settings["max_num_batched_tokens"] = max(
        settings["max_num_batched_tokens"], settings["max_num_seqs"]
    )
    count = rng.choice([2, 3, 5, 8, 12])
    spread = rng.choice([0.02, 0.2, 1.0])
    clients = tuple(_client(seed, i, spread) for i in range(count))
    kinds = ["step fails", "pause", "reset", "abort all", "stall"]
    kinds += ["rank dies", "rank is silent", "rank fails", "all ranks fail"] * (num_ranks > 1)
    kinds += ["update", "update aborts"] * (num_ranks == 1)
    kinds += ["process dies"] * process
    kinds += ["scheduler breaks", "device is lost", "shutdown", "nan"]
    events = []
    for number in range(rng.choice([0, 0, 1, 1, 2])):
        own = random_of("event", seed, number)
        kind = own.choice(kinds)
        events.append(Event(own.uniform(0.0, 1.2), kind, _number(own, kind, num_ranks)))
    return Plan(
        seed,
        settings,
        clients,
        tuple(events),
        process,
        num_ranks,
        step_s=rng.choice([1e-3, 1e-2, 5e-2]),
    )


def _number(rng: Any, kind: str, num_ranks: int) -> float:
    if kind == "step fails":
        return rng.choice([1, 1, 2, 6])
    if kind.startswith("rank"):
        return rng.randrange(num_ranks)
    if kind in ("pause", "stall"):
        return rng.choice([0.3, 3.0, 40.0])
    if kind == "shutdown":
        return rng.choice([0.0, 0.3, 5.0])
    return 1


def _client(seed: int, number: int, spread: float) -> Client:
    rng = random_of("client", seed, number)
    does = rng.choice(("stays",) * 7 + BEHAVIOURS)
    bodies = tuple(_body(rng, f"{number}-{i}") for i in range(rng.choice([1, 1, 1, 2])))
    return Client(
        f"c{number}",
        rng.uniform(0.0, spread),
        bodies,
        does,
        rng.choice([0.0, 0.01, 0.1, 1.0]) if does != "reads slowly" else rng.choice([1.0, 30.0]),
        rng.choice([1e-4, 1e-3, 2e-2]),
    )


def _body(rng: Any, request_id: str) -> dict[str, Any]:
    beginning = [rng.choice([4, 5])] * rng.randrange(0, 17)
    prompt = beginning + [rng.randrange(4, 10) for _ in range(rng.randrange(1, 8))]
    if rng.random() < 0.04:
        prompt = [POISON, *prompt]
    if rng.random() < 0.04:
        prompt = prompt * 8
    body: dict[str, Any] = {
        "model": "story",
        "prompt": prompt,
        "request_id": request_id,
        "seed": rng.randrange(3),
        "max_tokens": rng.choice([1, 2, 5, 12, 30]),
        "n": rng.choice([1, 1, 1, 2, 3]),
        "stream": rng.random() < 0.6,
        "return_token_ids": True,
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        body["stop_token_ids"] = list(range(0, 300, 9))
    if rng.random() < 0.3:
        body["cache_salt"] = rng.choice(["a", "b"])
    if rng.random() < 0.3:
        body["logprobs"] = 0
    if rng.random() < 0.2:
        body["user"], body["priority"] = rng.choice(["u0", "u1"]), rng.randrange(3)
    if rng.random() < 0.1:
        body["timeout"] = rng.choice([0.01, 0.3, 5.0])
    return body


def smaller(plan: Plan) -> list[Plan]:
    """Return plans with one thing less, those that lose most first."""
    found = []
    for i in range(len(plan.clients)):
        found.append(replace(plan, clients=plan.clients[:i] + plan.clients[i + 1 :]))
    for i in range(len(plan.events)):
        found.append(replace(plan, events=plan.events[:i] + plan.events[i + 1 :]))
    if plan.process:
        found.append(replace(plan, process=False))
    simple = {
        "has_files": False, "num_swap_blocks": 0, "preemption": "auto", "overlap": False,
        "enable_prefix_caching": False, "scheduling_policy": "fcfs", "victim": "newest",
        "long_prefill_token_threshold": None, "max_waiting_requests": None, "audit": 0.0,
        "num_blocks": 30,
    }  # fmt: skip
    for name, value in simple.items():
        if plan.settings[name] != value:
            settings = plan.settings | {name: value}
            if not settings["num_swap_blocks"]:
                settings |= {"preemption": "auto", "has_files": False}
            found.append(replace(plan, settings=settings))
    for i, client in enumerate(plan.clients):
        less: list[Client] = []
        if client.does != "stays":
            less.append(replace(client, does="stays"))
        if len(client.bodies) > 1:
            less.append(replace(client, bodies=client.bodies[:1]))
        for j, body in enumerate(client.bodies):
            for name, value in (("n", 1), ("stream", False)):
                if body[name] != value:
                    bodies = list(client.bodies)
                    bodies[j] = body | {name: value}
                    less.append(replace(client, bodies=tuple(bodies)))
        for one in less:
            found.append(replace(plan, clients=(*plan.clients[:i], one, *plan.clients[i + 1 :])))
    return found
