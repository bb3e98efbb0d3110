"""A worker process: one device, one shard, the same steps as all others.

parent -> reader's thread -> queue -> this thread: settings, size, then steps: submit
                                   -> answering thread: result -> parent

The reader ends the process when the parent's end of the socket closes, whatever the other threads
wait for, and says every second that the process lives and how many collectives it has done.
"""

from __future__ import annotations

import datetime
import gc
import os
import queue
import select
import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tilewise.distributed.exchange import goes_through_host
from tilewise.distributed.shard_group import ShardGroup
from tilewise.distributed.shards import load_shard, shard_adapter, shard_config
from tilewise.engine.adapters import LoadedAdapter
from tilewise.engine.captured.ahead import compile_ahead
from tilewise.engine.captured.graphs import prepare
from tilewise.engine.captured.prompt_steps import has_run
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.making import state_memory
from tilewise.engine.memory import check_memory, free_memory
from tilewise.engine.options import Options
from tilewise.engine.sampling_options import Matcher, StructuredOutputs
from tilewise.engine.settings import of_plain, spec_of
from tilewise.engine.sizing import Blocks, allocate, blocks_on_cuda, warm_up
from tilewise.engine.steps.adapter_slots import AdapterSlots, empty_slots
from tilewise.engine.steps.runner import Runner, StepHandle
from tilewise.engine.tables.host_cache import HostCache
from tilewise.engine.tables.offload import fingerprint
from tilewise.engine.tensor_parallel.remote_host import Window
from tilewise.engine.tensor_parallel.sharded_runner import ShardedRunner
from tilewise.engine.tensor_parallel.wire import (
    BatchReader,
    FrameReader,
    named,
    send,
    write_samples,
)
from tilewise.engine.tokenizer import load_tokenizer
from tilewise.models.adapters import adapter_sites, read_adapter
from tilewise.models.config import read_config
from tilewise.models.decoder import Decoder
from tilewise.models.native import for_device
from tilewise.models.registry import empty_model

__all__ = ["main"]

BEAT_S = 1.0
# Another rank that is late says nothing here: the parent judges who is. This only bounds what a
# collective may wait when the parent is gone, too.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=1)


class _Line:
    """The socket to the parent: a thread puts frames that arrive into `inbox`, any thread may
    `tell`.

    That thread also says every second that the process lives, and ends the process when the parent
    is gone.
    """

    def __init__(self, connection: socket.socket, folder: str) -> None:
        self._socket, self._folder = connection, folder
        self._lock = threading.Lock()
        self.group: ShardGroup | None = None
        self.inbox: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, *message: Any) -> None:
        """Send a frame to the parent; if the parent is gone, end this process."""
        try:
            with self._lock:
                send(self._socket, message)
        except OSError:
            self._leave()

    def _leave(self) -> None:
        """Remove the workers' folder and end the process at once, even if other threads wait."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)

    def _read(self) -> None:
        frames = FrameReader()
        while True:
            ready, _, _ = select.select([self._socket], [], [], BEAT_S)
            if not ready:
                self.tell("beat", 0 if self.group is None else self.group.num_calls)
                continue
            try:
                data = self._socket.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                self._leave()
            for frame in frames.feed(data):
                self.inbox.put(frame)


class _Worker:
    """One rank: its process group, its shard of the model, and the runner that computes its steps.

    Args:
        line: the line to the parent.
        settings: the settings that `processes.Workers` was given, with the rank and the folder
            where the ranks meet.
    """

    def __init__(self, line: _Line, settings: dict[str, Any]) -> None:
        self.line, self.settings = line, settings
        self.config = config = of_plain(settings["config"])
        rank, size = settings["rank"], settings["size"]
        self.device = config.device
        has_own_gpu = self.device.type == "cuda" and self.device.index is None
        if has_own_gpu:
            self.device = torch.device("cuda", rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(settings["num_threads"])
        store = dist.FileStore(  # type: ignore[attr-defined]
            settings["meeting"], size
        )
        dist.init_process_group(
            "nccl" if has_own_gpu else "gloo",  # NCCL has no two ranks on one GPU
            store=store,
            rank=rank,
            world_size=size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=self.device if has_own_gpu else None,
        )
        self.group = ShardGroup(rank, size, self.device, dist.group.WORLD)
        line.group = self.group
        self.group.meet()
        self.identity = ""
        self.model = load_shard(
            str(config.model),
            self.group,
            dtype=config.dtype,
            random_weights=config.random_weights,
            is_int8=config.is_int8,
            read=self._identify if config.offload_dir is not None else None,
            before=self._check_memory if self.device.type == "cuda" else None,
        )
        self.spec = spec_of(self.model.config, config)
        self.adapters: dict[int, LoadedAdapter] = {}
        self._whole = read_config(str(config.model)) if config.enable_lora else None
        self.slots = self._slots() if self._whole is not None else None
        self.reader = BatchReader(self._new_matcher, self.adapters)
        self._options: Options | None = None
        self.runner: Runner

    def _check_memory(self, model: Decoder) -> None:
        """Refuse a shard whose weights and cache do not fit in the device's free memory.

        Nothing is allocated yet. Ranks that share a device all measure before one allocates.

        Raises:
            ValueError: there is less memory; see `check_memory`.
        """
        config = self.config
        share = config.gpu_memory_utilization if config.num_blocks is None else None
        free = free_memory(self.device, share)
        is_shared = config.device.index is not None
        if is_shared:  # all look before one of them takes any
            self.group.stack(torch.zeros(1, device=self.device))
        check_memory(
            model,
            spec_of(model.config, config),
            self.device,
            free,
            num_blocks=config.num_blocks,
            num_processes=self.settings["size"] if is_shared else 1,
        )

    def _slots(self) -> AdapterSlots:
        """Return new slots for adapters, of the sizes that this rank's part of an adapter has."""
        config, group = self.config, self.group
        assert self._whole is not None
        own = for_device(shard_config(self._whole, group.size, group.rank), self.device)
        slots = empty_slots(
            adapter_sites(empty_model(own, "float32", "meta")),
            count=config.max_loras,
            max_rank=config.max_lora_rank,
            device=self.device,
            dtype=self.model.dtype,
        )
        return AdapterSlots(self.model, slots)

    def load_adapter(self, number: int, path: str) -> None:
        """Read an adapter from the folder `path` and keep this rank's part of it under `number`."""
        assert self._whole is not None
        sites = adapter_sites(empty_model(self._whole, "float32", "meta"))
        whole = read_adapter(path, sites, max_rank=self.config.max_lora_rank)
        part = shard_adapter(whole, self._whole, self.group.rank, self.group.size)
        self.adapters[number] = LoadedAdapter(number, "", part)

    def _identify(self, model: Decoder) -> None:
        """Set `identity`, a hash of all that this rank's keys and values depend on beside the
        tokens."""
        spec = spec_of(model.config, self.config)
        self.identity = fingerprint(model, spec, self.config.weight_dtype).hex()

    def num_blocks(self) -> Blocks:
        """Return how many cache blocks this rank's GPU has room for, one number or one for each
        group.

        0 on a CPU, where the parent counts, or if the config says the number. Kernels of captured
        steps are compiled ahead first.
        """
        config = self.config
        if config.has_graphs and not self.spec.states:  # `rehearsal` has no layers with states
            self._compile_ahead()
        if self.device.type != "cuda" or config.num_blocks is not None:
            return 0
        return blocks_on_cuda(
            self.model,
            self.spec,
            self.device,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            gpu_memory_utilization=config.gpu_memory_utilization,
            has_graphs=config.has_graphs,
            captures_prompts=has_run(self.spec),
            adapters=self.slots,
            states=state_memory(config, self.spec),
        )

    def _compile_ahead(self) -> None:
        """Let the ranks of this host compile the kernels of the start side by side."""
        config = self.config
        compile_ahead(
            self.model,
            self.spec,
            self.device,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            captures_prompts=has_run(self.spec),
            is_lazy=config.graphs == "lazy",
            num_blocks=config.num_blocks,
            group=self.group,
            adapters=self.slots,
        )

    def make_runner(
        self, num_blocks: Blocks, num_swap_blocks: int, num_slots: int, num_checkpoints: int
    ) -> tuple[float, str | None, list[list[int]] | None]:
        """Allocate the cache, make the runner, compile or capture its steps, and measure main
        memory.

        Args:
            num_blocks: the number of cache blocks, one for all groups of layers or one for each.
            num_swap_blocks: the number of blocks of main memory; 0 for none.
            num_slots, num_checkpoints: the numbers of slots and checkpoints of states.

        Returns:
            The blocks that move to main memory or back a second, 0 without main memory; the reason
            why NCCL adds small sums, or None; and the bytes of each array of a block of main
            memory, by group, or None where blocks go to no files.
        """
        config, most = self.config, self.config.max_num_batched_tokens
        storage = allocate(
            self.spec,
            num_blocks,
            self.device,
            num_slots=num_slots,
            num_checkpoints=num_checkpoints,
        )
        host = HostCache(storage, num_swap_blocks) if num_swap_blocks else None
        if config.has_graphs:
            self._check_graphs()
            self.runner = on_device = DeviceRunner(
                self.model,
                storage,
                max_num_seqs=config.max_num_seqs,
                max_model_len=config.max_model_len,
                max_num_batched_tokens=most if has_run(self.spec) else None,
                adapters=self.slots,
            )
            prepare(
                on_device,
                max_num_batched_tokens=most,
                is_lazy=config.graphs == "lazy",
            )
            gc.collect()
            gc.freeze()  # what lives now lives on, and is not walked again
        else:
            batch_invariant = config.batch_invariant
            self.runner = sharded = ShardedRunner(
                self.model, storage, batch_invariant=batch_invariant
            )
            sharded.adapters = self.slots
            warm_up(self.model, self.spec, self.device, batch_invariant=batch_invariant)
        self.runner.host = host
        rate = 0.0 if host is None else host.measure()
        sizes = None
        if host is not None and config.offload_dir is not None:
            sizes = [host.sizes(group) for group in range(len(self.spec.windows))]
            self._window = Window.make(Path(self.settings["window"]), max(map(sum, sizes)))
            self._sizes = sizes
        return rate, self.group.why_no_symmetric_memory, sizes

    def pass_block(self, what: str, slot: int, group: int) -> None:
        """Copy a block of main memory to the window shared with the parent ("read"), or back
        ("write")."""
        host = self.runner.host
        assert host is not None
        if what == "read":
            self._window.put(host.read(slot, group))
        else:
            host.write(slot, self._window.get(self._sizes[group]), group)

    def _check_graphs(self) -> None:
        """Refuse CUDA graphs where tensors are sent through main memory.

        Raises:
            ValueError: the workers share a GPU and cannot read one another's memory.
        """
        refusal = self.group.why_no_symmetric_memory
        if goes_through_host(self.group.group, self.device) and refusal is not None:
            raise ValueError(
                "graphs must be off where workers share a GPU and cannot read one another's "
                f"memory ({refusal}), got {self.config.graphs!r}"
            )

    def _new_matcher(self, structured: StructuredOutputs) -> Any:
        settings = self.settings
        if self._options is None:
            tokenizer = load_tokenizer(Path(str(self.config.tokenizer or self.config.model)))
            self._options = Options(tokenizer, settings["vocab_size"], settings["end_ids"])
        start = self._options.start_of(structured, is_tried=True)  # by the parent

        def new_matcher() -> Matcher:
            matcher: Matcher = start()
            return matcher

        return new_matcher

    def serve(self) -> None:
        """Run the parent's steps and tasks in the order of their messages; never returns.

        The process ends when the parent is gone. An error of a step goes to the parent.
        """
        answers: queue.SimpleQueue[tuple[int, StepHandle | Exception]] = queue.SimpleQueue()
        threading.Thread(target=self._answer, args=(answers,), daemon=True).start()
        while True:
            what, *rest = self.line.inbox.get()
            if what == "reset":
                self.reader.reset()
                self.runner.reset()
                continue
            if what in ("read", "write"):
                number, *more = rest
                self._do(number, partial(self.pass_block, what, *more))
                continue
            if what == "load_adapter":
                number, *more = rest
                self._do(number, partial(self.load_adapter, *more))
                continue
            if what == "forget_adapter":
                self.adapters.pop(rest[0], None)
                continue
            number, message = rest
            try:
                answers.put((number, self.runner.submit(self.reader.read(message))))
            except Exception as error:
                answers.put((number, error))

    def _do(self, number: int, work: Callable[[], None]) -> None:
        """Call `work` between two steps, and send the parent "done", or "failed" with the error.

        Args:
            number: the number of the parent's request.
        """
        try:
            work()
        except Exception as error:
            self.line.tell("failed", number, *named(error))
        else:
            self.line.tell("done", number, None, 0)

    def _answer(self, answers: queue.SimpleQueue[tuple[int, StepHandle | Exception]]) -> None:
        """Send the result of each step to the parent, in order; only the first rank sends tokens.

        Args:
            answers: the steps' numbers with their handles, or the error of one that was not
                started.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread, or it would open the first GPU
        while True:
            number, handle = answers.get()
            try:
                if isinstance(handle, Exception):
                    raise handle
                samples = handle.result()
            except Exception as error:
                if self.runner.is_lost():
                    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    os._exit(1)
                self.line.tell("failed", number, *named(error))
            else:
                told = write_samples(samples) if self.group.rank == 0 else None
                self.line.tell("done", number, told, self.runner.num_compilations)


def main(fd: int, folder: str) -> None:
    """Serve the parent process at the other end of a socket until it closes.

    Args:
        fd: the file descriptor of the socket.
        folder: the workers' folder, which is removed when the parent is gone.
    """
    line = _Line(socket.socket(fileno=fd), folder)
    try:
        worker = _Worker(line, line.inbox.get()[1])
        line.tell("ready", (worker.num_blocks(), worker.identity))
        _, *sizes = line.inbox.get()
        line.tell("ready", worker.make_runner(*sizes))
    except Exception as error:
        traceback.print_exc()  # to the log, beside what compilers say there
        line.tell("failed", -1, *named(error))
        threading.Event().wait()  # for the parent's end, so that it reads this first
    worker.serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
