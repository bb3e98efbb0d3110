"""One simulation: clients, network, HTTP, the server, its engine and ranks, all on one clock.

    Client -> bytes -> uvicorn's protocol -> application -> bridge -> AsyncLLM, or a process -> Host
           -> EngineLoop -> Engine -> scheduler -> the virtual model, or ranks of it

What the parts are is the package's; what stands for sockets, threads, processes and devices is in
the files beside this one. At the end each answer is compared with that of its request alone, each
error with what can have caused it, and everything must be free.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import h11
import msgspec

from tests.engine import simulator
from tests.server.fake_engine import STORY
from tests.simulation.engine import (
    DRAWN,
    EngineDriver,
    TurnedLoop,
    VirtualLLM,
    VirtualRunner,
    WeightedModel,
    WeightedStore,
    random_of,
    tokens_alone,
    waiting_future,
    whole_draw,
)
from tests.simulation.network import Connection, Wire
from tests.simulation.plan import POISON, Client, Event, Plan
from tests.simulation.ranks import Events, Group, VirtualWorkers, ranks_draw
from tests.simulation.virtual_time import START, Clock, Pool, VirtualEventLoop, virtual
from tilewise.engine.async_llm import AsyncLLM, Mailbox
from tilewise.engine.batch import Batch, SampledToken, TokenEvent
from tilewise.engine.engine import Engine
from tilewise.engine.outputs import Generation
from tilewise.engine.request import FinishReason, Request, SamplingParams
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.tensor_parallel.runner import ParallelRunner
from tilewise.engine.tokenizer import load_tokenizer
from tilewise.errors import RequestError
from tilewise.server import app as server_app
from tilewise.server.bridge import Bridge
from tilewise.server.chat import ChatTemplate, read_template
from tilewise.server.engine_process import remote as process_remote
from tilewise.server.engine_process import wire
from tilewise.server.engine_process.host import LOOK_S, Host
from tilewise.server.limits import Queue, RequestLimits
from tilewise.server.metrics import Metrics
from tilewise.server.run import Server, ServerOptions
from tilewise.server.service import Service

PATIENCE_S = 1000.0  # of virtual time, that one request may take
INJECTED = "injected by the simulation"
# Kinds of events after which no answer is owed to who asks later, or waits: see `World.may_end`.
DEADLY = {
    "process dies", "device is lost", "shutdown", "rank dies", "rank is silent", "rank fails",
}  # fmt: skip


class WrongError(AssertionError):
    """A simulation found something wrong."""


@dataclass
class Outcome:
    """What became of one request, as its client saw it.

    Attributes:
        end: "complete", "refused" where no connection was taken, "cut" where it ended before the
            answer did, "left" where the client did not wait for it.
    """

    client: Client
    body: dict[str, Any]
    sent: float
    status: int = 0
    data: bytearray = field(default_factory=bytearray)
    end: str = ""
    done: float = 0.0


@functools.cache
def _tokenizer() -> Any:
    return load_tokenizer(STORY)


@functools.cache
def _template() -> Any:
    source, tokens = read_template(STORY, None)
    return ChatTemplate(source, tokens)


class SimulatedHost(Host):
    """The engine's side of a process: its threads are callbacks."""

    def __init__(self, world: World, llm: VirtualLLM, send: Wire) -> None:
        super().__init__(llm, SimpleNamespace(sendall=send.send), None)
        self._world, self._buffer = world, bytearray()
        self._is_due = SimpleNamespace(set=self._soon, clear=lambda: None)
        self._handle: Any = None
        self._decode = msgspec.msgpack.Decoder(wire.Ask | wire.Drop, ext_hook=wire.wide).decode
        self.is_dead = False
        world.loop.call_later(LOOK_S, self._look)

    def take(self, data: bytes) -> None:
        """Take bytes of the server."""
        if self.is_dead:
            return
        self._buffer += data
        for body in wire.frames(self._buffer):
            message = self._decode(body)
            if isinstance(message, wire.Drop):
                self._drop(message.number)
            else:
                self._ask(message)

    def _soon(self) -> None:
        if self._handle is None:
            self._handle = self._world.loop.call_later(
                self._world.draw.expovariate(5e3), self._flush
            )

    def _flush(self) -> None:
        self._handle = None
        if not self.is_dead:
            self._send()

    def _look(self) -> None:
        if self.is_dead or self._is_over:
            return
        loop = self._llm.loop
        is_alive = loop.is_alive
        if loop.last_step_time != self._step_told:
            self._send()
        if not is_alive:
            self._world.kill_process()
        else:
            self._world.loop.call_later(LOOK_S, self._look)

    def answer(self, name: str, arguments: Any) -> Any:
        """Answer a call, over the messages of the real one."""
        sent = wire.frame([name, wire.plain(arguments)])
        name, arguments = msgspec.msgpack.decode(sent[4:], ext_hook=wire.wide)
        try:
            answer = [True, msgspec.to_builtins(self._call(name, arguments))]
        except Exception as error:
            answer = [False, wire.failure_of(error)]
        return msgspec.msgpack.decode(wire.frame(answer)[4:], strict=False)


class World:
    """A simulation of a plan.

    Attributes:
        outcomes: one for each request that was sent.
        log: what happened, a line each: equal in two runs of one plan.
        broke_again: True if a scheduler broke before a step of it had ended, after another did.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.draw = random_of("delays", plan.seed)
        self.clock = Clock()
        self.loop = VirtualEventLoop(self.clock, random_of("beside", plan.seed))
        self.outcomes: list[Outcome] = []
        self.log: list[str] = []
        self.broken: BaseException | None = None
        self.counts: dict[str, int] = {}
        self._newest_step = self._failing_step = 0
        self._fails_left = 0
        self._extra_s = 0.0
        self._damages = False
        self.server_is_gone = False
        self.broke_again = self._has_broken = False

    # ---- making it

    def _scheduler(self) -> Scheduler:
        given = dict(self.plan.settings)
        for name in ("overlap", "has_files", "audit", "slow_reader_s", "high"):
            del given[name]
        count, size = given.pop("num_blocks"), given.pop("block_size")
        scheduler = Scheduler(
            count,
            size,
            **given,
            user_weights={"u1": 2.0} if given["scheduling_policy"] == "fair" else None,
            store=self.store,
            clock=self.clock,
        )
        rates = scheduler.preemption.rates
        rates.prefill_tokens, rates.link_blocks = 10.0, 100.0
        update = scheduler.update

        def breaking(batch: Any, drawn: Any) -> Any:
            if self._take("scheduler breaks"):
                self.broke_again |= self._has_broken
                self._has_broken = True
                raise RuntimeError(f"{INJECTED}: the scheduler broke")
            return update(batch, drawn)

        scheduler.update = breaking
        return scheduler

    def _make_engine(self) -> None:
        plan, chance = self.plan, random_of("engine", self.plan.seed)
        self.store = WeightedStore(chance.random) if plan.settings["has_files"] else None
        self.driver = EngineDriver(self.loop, self._step_seconds)
        damage = random_of("damage", plan.seed)
        scheduler = self._scheduler()
        if plan.num_ranks > 1:
            self.events = Events(self.clock)
            sizes = {
                name: plan.settings[name]
                for name in ("block_size", "num_blocks", "num_swap_blocks")
            }
            self.group = Group(
                plan.num_ranks, sizes, self.events, random_of("ranks", plan.seed), self._rank_fails
            )
            workers = VirtualWorkers(self.group)
            runner: Any = ParallelRunner(workers, None, None)
            self.loop.call_later(0.1, self._let_ranks)
            self.draw_of = ranks_draw(plan.num_ranks)
        else:

            def new_model(scheduler: Scheduler) -> WeightedModel:
                model = WeightedModel(
                    scheduler,
                    lambda: self._damages and damage.random() < 0.03,
                    lambda: self.engine.version,
                )
                if self.store is not None:
                    self.store.model = model
                return model

            runner = VirtualRunner(new_model, self._why_fails)
            self.draw_of = whole_draw
        self.engine = Engine(
            scheduler, runner, overlap=plan.settings["overlap"], new_scheduler=self._scheduler
        )
        runner.engine = self.engine
        step = self.engine.step

        def ending() -> Any:
            events = step()
            self._has_broken = False
            return events

        self.engine.step = ending
        if plan.settings["audit"]:
            self.engine.watch(plan.settings["audit"], 0.0, seed=plan.seed, stops=False)
        self.engine_loop = TurnedLoop(self.engine, self._scheduler, self.driver.wake)
        self.driver.core = self.core = self.engine_loop._core
        self.driver.on_turn = self._after_turn
        self.llm = VirtualLLM(self.engine_loop, _tokenizer(), plan.num_ranks)
        if plan.num_ranks > 1:
            runner.end_with_workers(self.engine_loop)
        self.runner = runner
        self._guard(runner)

    def _guard(self, runner: Any) -> None:
        """Let no refusal of the virtual model pass for a failure of a device."""
        if self.plan.num_ranks > 1:
            return
        real = runner.submit

        def submit(batch: Batch) -> Any:
            live = self.engine.scheduler.roster.live
            names = [live[run.seq_id].request.request_id for run in batch.sequences]
            if len({name.startswith("audit-") for name in names}) > 1:
                raise self._wrong("a second computation delays who is served")
            handle = self._guarded(lambda: real(batch))
            return SimpleNamespace(result=lambda: self._guarded(handle.result))

        runner.submit = submit

    def _wrong(self, why: str) -> WrongError:
        self.broken = self.broken or WrongError(why)
        return WrongError(why)

    def _guarded(self, work: Any) -> Any:
        try:
            return work()
        except (AssertionError, LookupError, AttributeError, TypeError) as error:
            self.broken = self.broken or error
            raise

    def _make_server(self) -> None:
        plan = self.plan
        if plan.process:
            engine: Any = self._remote()
            loop: Any = engine
        else:
            engine, loop = AsyncLLM(self.llm), self.engine_loop
        self.bridge = Bridge(
            engine,
            loop,
            queue=Queue(),
            limits=RequestLimits(),
            metrics=Metrics("story", engine.stats),
            slow_reader_s=plan.settings["slow_reader_s"],
        )
        self.bridge._pool.shutdown(wait=False)
        self.bridge._pool = Pool(self.loop)
        self.front = engine
        service = Service(self.bridge, ["story"], _template())
        options = ServerOptions(shutdown_timeout_s=5.0, header_timeout_s=4.0)
        self.server = Server(
            server_app.build_app(service), self.bridge, options, handles_signals=False
        )
        self.loop.create_task(self._watch_server())
        self.server._watch = self.loop.create_task(self.server._watch_engine())

    def _remote(self) -> Any:
        remote = object.__new__(process_remote.RemoteEngine)
        to_host = Wire(self.loop, random_of("to host", self.plan.seed), self._to_host, 2e-4)
        to_server = Wire(self.loop, random_of("to server", self.plan.seed), self._to_server, 2e-4)
        self.pipes = (to_host, to_server)
        self.host = SimulatedHost(self, self.llm, to_server)
        remote._process = SimpleNamespace(poll=lambda: None, returncode=1)
        remote._lock = threading.Lock()
        remote._transport = SimpleNamespace(write=to_host.send)
        remote._loop, remote._mailbox = self.loop, Mailbox(self.loop, 0.04)
        remote._connecting = asyncio.Lock()
        remote._buffer, remote._pending, remote._ended = bytearray(), {}, None
        remote._is_closed = False
        remote._decode = msgspec.msgpack.Decoder(wire.News | wire.End).decode
        remote._numbers, remote._names = iter(range(1 << 30)), iter(range(1 << 30))
        remote.last_step_time, remote.num_restarts = None, 0
        remote.devices, remote.start_seconds, remote._share = "cpu", {}, 0.04
        remote.limits = self.engine.scheduler.limits
        remote.config, remote.tokenizer = self.llm.config, _tokenizer()

        def call(name: str, *arguments: Any) -> Any:
            if remote._ended is not None:
                raise process_remote.EngineClosedError(remote._ended)
            is_well, value = self.host.answer(name, arguments)
            if not is_well:
                raise wire.error_of(msgspec.convert(value, wire.Failure))
            return value

        remote._call = call
        self.remote = remote
        return remote

    def _to_host(self, data: bytes) -> None:
        self.host.take(data)

    def _to_server(self, data: bytes) -> None:
        self.remote.data_received(data)

    def kill_process(self) -> None:
        """Let the engine's process end, in the middle of anything."""
        if not self.host.is_dead:
            self.note("the process ends")
            self.host.is_dead = True
            for pipe in self.pipes:
                pipe.cut()
            self.core.is_over = True
            self.remote._process.poll = lambda: 1
            self.loop.call_soon(self.remote.connection_lost, None)

    # ---- what goes wrong

    def _step_seconds(self) -> float:
        seconds = self.draw.expovariate(1 / self.plan.step_s) + self._extra_s
        self._extra_s = 0.0
        return seconds

    def _take(self, kind: str) -> bool:
        if self.counts.get(kind, 0) > 0:
            self.counts[kind] -= 1
            return True
        return False

    def _why_fails(self, batch: Batch, is_submit: bool) -> Exception | None:
        if self.runner.is_lost_for_good:
            return RuntimeError(f"{INJECTED}: the device is lost")
        if not is_submit:
            for run in batch.sequences:
                seq = self.engine.scheduler.roster.live.get(run.seq_id)
                if seq is not None and seq.request.prompt_token_ids[0] == POISON:
                    return RuntimeError(f"{INJECTED}: poison")
        if self.counts.get("step fails", 0) and self.draw.random() < 0.5:
            self.counts["step fails"] -= 1
            return RuntimeError(f"{INJECTED}: a step fails")
        return None

    def _rank_fails(self, rank: int, number: int, batch: Batch) -> Exception | None:
        if self.counts.get(f"rank {rank} fails", 0):
            self.counts[f"rank {rank} fails"] -= 1
            return MemoryError(f"{INJECTED}: one rank fails")
        if number > self._newest_step:  # the first rank that comes to a step decides for all
            self._newest_step = number
            if self.counts.get("all ranks fail", 0):
                self.counts["all ranks fail"] -= 1
                self._failing_step = number
        if number == self._failing_step:
            return MemoryError(f"{INJECTED}: all ranks fail")
        for run in batch.sequences:
            seq = self.engine.scheduler.roster.live.get(run.seq_id)
            if seq is not None and seq.request.prompt_token_ids[0] == POISON:
                return RuntimeError(f"{INJECTED}: poison")
        return None

    def _let_ranks(self) -> None:
        """Let ranks live on while the engine does not wait for them."""
        if not self.group.is_closed and not self.core.in_turn:
            self.events.run_until_now()
            self.group.workers.watch()
        if not self.group.is_closed:
            self.loop.call_later(0.1, self._let_ranks)

    def happen(self, event: Event) -> None:
        """Let an event come to pass."""
        self.note(f"event {event.kind} {event.number}")
        kind, number = event.kind, event.number
        if kind in ("step fails", "scheduler breaks", "all ranks fail"):
            self.counts[kind] = self.counts.get(kind, 0) + int(number)
        elif kind == "nan":
            self._damages = True
        elif kind == "stall":
            self._extra_s += number
        elif kind == "device is lost":
            if self.plan.num_ranks == 1:
                self.runner.is_lost_for_good = True
            else:
                self.group.workers.lose_rank(0, "dead")
        elif kind in ("rank dies", "rank is silent"):
            how = "dead" if kind == "rank dies" else "silent"
            self.group.workers.lose_rank(int(number), how)
        elif kind == "rank fails":
            self.counts[f"rank {int(number)} fails"] = 1
        elif kind == "process dies":
            self.kill_process()
        elif kind == "shutdown":
            self.server._options = ServerOptions(shutdown_timeout_s=number, header_timeout_s=4.0)
            self.server.stop()
        else:
            self.loop.create_task(self._administer(kind, number))

    async def _administer(self, kind: str, number: float) -> None:
        """Do what an administrator may."""
        with contextlib.suppress(Exception):  # of an engine that has ended
            if kind == "pause":
                await self.bridge.pause()
                await asyncio.sleep(number)
                await self.bridge.resume()
            elif kind == "reset":
                await self.bridge.questions.within(self.front.reset_prefix_cache())
            elif kind == "abort all":
                for job in list(self.bridge.jobs.values()):
                    await self.bridge.abort(job)
            else:
                running = "abort" if kind == "update aborts" else "wait"
                await self.front.update_weights("other", running=running)

    def note(self, what: str) -> None:
        """Write a line of the log."""
        self.log.append(f"{self.clock.now - START:.6f} {what}")

    def _after_turn(self) -> None:
        if self.draw.random() < 0.2 and not self.core.is_over:
            self.engine.scheduler.check_integrity()

    # ---- the server's end

    async def _watch_server(self) -> None:
        while not self.server.should_exit:
            await asyncio.sleep(0.1)
        self.note("the server ends")
        self.server_is_gone = True
        for connection in list(self.server.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(1.0)
        for task in list(self.server.server_state.tasks):
            task.cancel()
        await asyncio.sleep(0)
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()

    # ---- clients

    def _protocol(self) -> Any:
        config = self.server.config
        return config.http_protocol_class(
            config=config, server_state=self.server.server_state, app_state={}
        )

    async def _client(self, client: Client) -> None:
        draw = random_of("client's delays", self.plan.seed, client.name)
        await asyncio.sleep(client.at)
        parser = h11.Connection(h11.CLIENT)
        current: Outcome | None = None
        has_come, is_over = asyncio.Event(), False

        def on_data(data: bytes) -> None:
            nonlocal is_over
            if is_over:
                return
            try:
                parser.receive_data(data)
                while True:
                    event = parser.next_event()
                    if event in (h11.NEED_DATA, h11.PAUSED):
                        return
                    if isinstance(event, h11.Response):
                        current.status = event.status_code
                    elif isinstance(event, h11.Data):
                        current.data += event.data
                    elif isinstance(event, h11.EndOfMessage):
                        current.end = "complete"
                        has_come.set()
                        return
                    elif isinstance(event, h11.ConnectionClosed):
                        break
            except h11.RemoteProtocolError:
                pass  # it ended before the answer did
            is_over = True
            if current is not None and not current.end:
                current.end = "cut"
            has_come.set()

        if self.server_is_gone:
            outcome = Outcome(client, client.bodies[0], self.clock.now, end="refused")
            outcome.done = self.clock.now
            self.outcomes.append(outcome)
            return
        connection = Connection(
            self.loop,
            draw,
            self._protocol,
            on_data,
            pace=client.pace,
            room=300 if client.does == "reads slowly" else 1 << 20,
            high=self.plan.settings["high"],
        )
        for number, body in enumerate(client.bodies):
            if is_over:
                break
            if number:
                if h11.MUST_CLOSE in (parser.our_state, parser.their_state):
                    break
                parser.start_next_cycle()
            has_come.clear()
            current = Outcome(client, body, self.clock.now)
            self.outcomes.append(current)
            content = json.dumps(body).encode()
            headers = [
                ("host", "localhost"), ("content-type", "application/json"),
                ("content-length", str(len(content))),
            ]  # fmt: skip
            request = h11.Request(method="POST", target="/v1/completions", headers=headers)
            data = parser.send(request) + parser.send(h11.Data(data=content))
            parser.send(h11.EndOfMessage())
            if client.does in ("stalls", "cuts while sending"):
                data = data[: draw.randrange(1, len(data))]
            connection.to_server.send(data)
            await self._behave(client, connection, current)
            if current.end == "left":
                current.done = self.clock.now
                return
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await has_come.wait()
            except TimeoutError:
                raise WrongError(
                    f"{client.name} has waited {PATIENCE_S} s for its answer"
                ) from None
            current.done = self.clock.now
            self.note(f"{body['request_id']} {current.end} {current.status}")
        connection.to_server.end()

    async def _behave(self, client: Client, connection: Connection, current: Outcome) -> None:
        if client.does in ("cuts", "cuts while sending"):
            await asyncio.sleep(client.seconds)
            if not current.end:
                connection.cut()
                current.end = "left"
        elif client.does == "half-closes":
            await asyncio.sleep(client.seconds)
            connection.to_server.end()
        elif client.does == "reads slowly":
            connection.hold()
            await asyncio.sleep(client.seconds)
            connection.read_on()

    # ---- all of it

    async def _play(self) -> None:
        self._make_engine()
        self._make_server()
        for event in self.plan.events:
            self.loop.call_later(event.at, self.happen, event)
        await asyncio.gather(*(self._client(client) for client in self.plan.clients))
        last = max([1.3, *(event.at for event in self.plan.events)])
        await asyncio.sleep(max(0.0, START + last - self.clock.now))
        for _ in range(2000):
            if self._is_quiet():
                break
            await asyncio.sleep(0.1)
        self._check_end()
        self._damages = False
        self.judge()
        if not self.core.is_over:
            self.engine_loop.close()
        if self.plan.num_ranks > 1:
            self.group.workers.close()
        if self.plan.process:
            self.host.is_dead = True

    def _is_quiet(self) -> bool:
        if self.driver.error is not None or self.broken is not None:
            return True
        auditor = self.engine.auditor
        return (
            not self.bridge.jobs
            and not self.bridge.is_paused
            and not self.server.server_state.tasks
            and (self.core.is_over or (not self.core.live and not self.engine.has_unfinished()))
            and (self.core.is_over or auditor is None or not auditor._waiting)
        )

    def _check_end(self) -> None:
        if self.driver.error is not None:
            raise WrongError(f"the engine's loop: {self.driver.error!r}") from self.driver.error
        if self.broken is not None:
            raise WrongError(f"the device refuses: {self.broken!r}") from self.broken
        if not self._is_quiet():
            raise WrongError("not all has ended")
        if self.bridge.queue.num_live or self.bridge.queue.num_waiting:
            raise WrongError("places in the queue are taken, and nobody is there")
        if self.core.is_over and not self.may_end():
            raise WrongError(f"the engine has ended: {self.core.reason}")
        if self.broke_again and not self.core.is_over:
            raise WrongError("the engine goes on, and its new scheduler broke at once")
        if self.core.is_over:
            return
        scheduler = self.engine.scheduler
        scheduler.check_integrity()
        simulator.check_idle(scheduler)
        if self.core.live or self.engine.has_unfinished():
            raise WrongError("the engine still has requests")
        if self.plan.process and (self.remote._pending or self.host._entries):
            raise WrongError("requests are left between the processes")
        stats = self.engine.stats()
        if stats.num_audits_different and "nan" not in self.plan.kinds():
            raise WrongError(f"an audit differs: {list(self.engine.differences)}")
        if self.plan.settings["audit"] == 1.0 and not self.plan.events:
            self.counts["audited"] = stats.num_audited

    def may_end(self) -> bool:
        """Whether what happened may have ended the engine."""
        return self.broke_again or bool(self.plan.kinds() & DEADLY)

    # ---- judging

    def judge(self) -> None:
        """Compare each answer with that of its request alone.

        Raises:
            WrongError: one is neither right nor an error with a cause.
        """
        for outcome in self.outcomes:
            why = self.why_wrong(outcome)
            if why is not None:
                raise WrongError(f"request {outcome.body['request_id']}: {why}")

    def why_wrong(self, outcome: Outcome) -> str | None:
        """Return what is wrong with an answer; None if it is right, or an error with a cause."""
        client = outcome.client
        is_whole = client.does not in ("stalls", "cuts while sending")
        if not is_whole:
            if outcome.status == 200:
                return "an answer to half of a request"
            return None
        told, error = self._told(outcome)
        wrong = self._wrong_tokens(outcome, told, outcome.end == "complete" and error is None)
        if wrong is not None:
            return wrong
        if error is not None:
            return self._unexplained(outcome, error)
        if outcome.end == "complete" or outcome.end == "left":
            return None
        if self.may_end() or client.does in ("half-closes", "reads slowly"):
            return None
        return f"the connection ended: {outcome.end}, status {outcome.status}"

    def _told(self, outcome: Outcome) -> tuple[list[Any], dict[str, Any] | None]:
        """Return samples as [tokens, text, reason, scores], and the error, of what was told."""
        if not outcome.status:
            return [], None
        if outcome.status != 200:
            if outcome.end != "complete":
                return [], None
            try:
                return [], json.loads(bytes(outcome.data))["error"]
            except ValueError:
                text = bytes(outcome.data)[:80]
                raise WrongError(f"an error must be JSON, got {outcome.status} {text!r}") from None
        samples: list[Any] = [[[], "", None, []] for _ in range(outcome.body["n"])]
        found: list[Any] = []
        error = None
        if outcome.body["stream"]:
            text = bytes(outcome.data).decode(errors="replace")
            lines = text.split("\n\n")[:-1]  # the last one may be cut
            for line in lines:
                content = line.removeprefix("data: ")
                if content == "[DONE]":
                    continue
                message = json.loads(content)
                if "error" in message:
                    error = message["error"]
                    continue
                found += message["choices"]
            if outcome.end == "complete" and error is None and "[DONE]" not in text:
                raise WrongError("a stream must end with [DONE]")
        elif outcome.end == "complete":
            found = json.loads(bytes(outcome.data))["choices"]
        else:
            return [], None
        for choice in found:
            sample = samples[choice["index"]]
            if sample[2] is not None:
                raise WrongError(f"sample {choice['index']} went on after its end")
            sample[0] += choice["token_ids"]
            sample[1] += choice["text"]
            sample[2] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                sample[3] += choice["logprobs"]["token_logprobs"]
        return samples, error

    def _alone(self, body: dict[str, Any], version: str) -> list[tuple[list[int], str, str]]:
        """Return tokens, text and reason of each sample of a request alone."""
        names = ("max_tokens", "n", "seed", "stop_token_ids", "ignore_eos")
        given = {name: body[name] for name in names if name in body}
        sampling = SamplingParams(**given)
        request = Request("alone", body["prompt"], sampling, (3,))
        limits = self.engine.scheduler.limits
        found = tokens_alone(
            body["prompt"], sampling, version, request.end_ids, limits.max_len(request),
            self.draw_of,
        )  # fmt: skip
        generation = Generation(request, None, _tokenizer())
        reasons = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
        for index, (tokens, reason) in enumerate(found):
            for place, token in enumerate(tokens):
                ends = reasons[reason] if place + 1 == len(tokens) else None
                asked = token if ends and token in request.stop_ids else None
                event = TokenEvent("alone", index, SampledToken(token), ends, stop_reason=asked)
                generation.take(event)
        texts = [completion.text for completion in generation.output.outputs]
        return [(*one, text) for one, text in zip(found, texts, strict=True)]

    def _wrong_tokens(self, outcome: Outcome, told: list[Any], is_complete: bool) -> str | None:
        if not told:
            return None
        reasons = []
        for version in self.llm.versions:
            why = self._differs(outcome, told, is_complete, version)
            if why is None:
                return None
            reasons.append(why)
        return reasons[0]

    def _differs(
        self, outcome: Outcome, told: list[Any], is_complete: bool, version: str
    ) -> str | None:
        kinds, body = self.plan.kinds(), outcome.body
        early = set()
        if kinds & {"abort all", "update aborts"}:
            early.add("abort")
        if "timeout" in body:
            early.add("deadline")
        for index, (sample, (tokens, reason, text)) in enumerate(
            zip(told, self._alone(body, version), strict=True)
        ):
            ids, own_text, own_reason, scores = sample
            if ids != tokens[: len(ids)]:
                return f"sample {index} has tokens {ids}, alone {tokens}"
            if own_reason in early or (own_reason == "error" and not is_complete):
                continue  # the cause of an error is judged with its message
            if own_reason is None:
                if is_complete:
                    return f"sample {index} of a whole answer has no reason to end"
            elif (ids, own_reason) != (tokens, reason):
                return f"sample {index} ended by {own_reason} after {ids}, alone {reason} {tokens}"
            elif own_text != text:
                return f"sample {index} has the text {own_text!r}, alone {text!r}"
            if "logprobs" in body and own_reason is not None:
                wanted = [-1.0 - (token % 97) / 128 for token in ids]
                if scores != wanted:
                    return f"sample {index} has log-probabilities {scores}, not {wanted}"
        return None

    def _unexplained(self, outcome: Outcome, error: dict[str, Any]) -> str | None:
        message, code, kinds = error["message"], error.get("code"), self.plan.kinds()
        body, client = outcome.body, outcome.client
        deadly = self.may_end()
        try:
            sampling = SamplingParams(max_tokens=body["max_tokens"], n=body["n"])
            self.engine.scheduler.limits.check(Request("x", body["prompt"], sampling))
        except RequestError:
            if outcome.status == 400:
                return None
        causes = {
            "waiting requests must be": code == "queue_full"
            and self.plan.settings["max_waiting_requests"] is not None,
            "shutting down": deadly,
            "reads too slowly": client.does == "reads slowly",
            f"{INJECTED}: poison": body["prompt"][0] == POISON,
            f"{INJECTED}: a step fails": "step fails"
            in kinds,  # of one request it is not tried again
            f"{INJECTED}: the scheduler broke": "scheduler breaks" in kinds,
            f"{INJECTED}: the device is lost": "device is lost" in kinds,
            f"{INJECTED}: one rank fails": "rank fails" in kinds,
            f"{INJECTED}: all ranks fail": "all ranks fail" in kinds,
            "device is lost": deadly,
            "worker": deadly,
            "logits must be finite": "nan" in kinds,
            "engine's process has ended": deadly,
            "the engine has failed": deadly,
            "the engine has ended": deadly,
            "aborted by an administrator": "abort all" in kinds,
            "must answer within": bool(kinds & {"stall"}),
            "deadline": "timeout" in body,
        }
        for words, holds in causes.items():
            if words in message and holds:
                return None
        return f"an error without a cause: {outcome.status} {error}"


def play(plan: Plan) -> World:
    """Run a simulation.

    Raises:
        WrongError: something is wrong.
    """
    world = World(plan)
    future = waiting_future(lambda: world.core, world.clock)
    logging_before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            virtual(world.clock, world.loop, future),
            mock.patch.object(simulator, "VOCAB", DRAWN),
            # The schemas of the API, which nobody asks for, take longer than all the rest.
            mock.patch.object(server_app, "describe"),
            mock.patch.object(server_app, "body_of", return_value=None),
        ):
            try:
                world.loop.run_until_complete(world._play())
            finally:
                tasks = asyncio.all_tasks(world.loop)
                for task in tasks:
                    task.cancel()
                if tasks:
                    world.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
                world.loop.close()
    finally:
        logging.disable(logging_before)
    return world


def digest(world: World) -> str:
    """Return a digest of what happened: equal in two runs of one plan."""
    told = [(o.body["request_id"], o.status, o.end, bytes(o.data), o.done) for o in world.outcomes]
    return hashlib.blake2b(repr((world.log, told)).encode(), digest_size=8).hexdigest()
