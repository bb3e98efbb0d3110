"""A start on Hopper without a GPU: what its rehearsal notes, what it asks for, and what is on disk.

    python -m tests.engine.start_worker

Its own process, because Triton must not be in interpreter mode here, which forks one for each line
that it reads (see `serve`). Nothing is launched: a stub tells Triton its target, tensors on the CPU
take the path of those on an H200, and memory of integers that nobody has written is poisoned, so
that whoever looks something up by it fails.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import tilewise.ops
from tests.engine.launches import on_hopper
from tilewise.cache.storage import KVStorage
from tilewise.distributed import inbox, shards
from tilewise.distributed.shard_group import ShardGroup
from tilewise.engine.captured import ahead, decode_step, graphs
from tilewise.engine.captured.rehearsal import rehearse, runner_to_rehearse
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.settings import cache_spec
from tilewise.kernels import device, early
from tilewise.kernels.host.requests import Request, recording
from tilewise.models.config import ModelConfig
from tilewise.models.decoder import Decoder
from tilewise.models.registry import empty_model

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Start:
    """A start to look at.

    Attributes:
        heads: query heads, key heads, channels of one.
        fields: of the config, beside those.
        limits: sequences, tokens of one, tokens of a step, tokens of a block.
        shares: rows may share prefixes.
        size: ranks of which this is the last.
    """

    heads: tuple[int, int, int] = (16, 8, 128)
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    limits: tuple[int, int, int, int] = (48, 2048, 1024, 16)
    cache: torch.dtype | None = None
    shares: bool = False
    size: int = 1
    batch_invariant: bool = False
    is_lazy: bool = False


_QWEN = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 5120,
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5,
    "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14_336, "num_hidden_layers": 16, "tie_word_embeddings": False,
}  # fmt: skip
_WINDOWS = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True,
    "sliding_window": 64, "max_window_layers": 1, "num_hidden_layers": 3,
}  # fmt: skip
STARTS: dict[str, Start] = {
    "tiny": Start((2, 1, 32), {"hidden_size": 64, "intermediate_size": 96}, (2, 64, 32, 16)),
    "qwen3-0.6b": Start(shares=True),
    "lazy": Start(is_lazy=True, limits=(9, 500, 64, 16)),
    "llama-3-8b": Start((32, 8, 128), _LLAMA_8B, (40, 3000, 512, 16)),
    "8 bits": Start(cache=torch.float8_e4m3fn, limits=(20, 900, 256, 16)),
    "windows": Start((8, 4, 64), _WINDOWS, (20, 900, 256, 16)),
    "invariant": Start(batch_invariant=True, limits=(20, 900, 256, 16)),
    "two ranks": Start(fields={"num_hidden_layers": 3}, size=2, limits=(20, 900, 256, 16)),
}


class _Driver:
    """Stands in for Hopper's: it knows its target and nothing else."""

    @staticmethod
    def is_active() -> bool:
        return False

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _early(where: torch.device, *, largest_weight: int = 0) -> Iterator[None]:
    is_large = largest_weight >= early.LARGE
    with early.launching(early.CHOSEN_LARGE if is_large else None):
        yield


def _poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **options: Any) -> Tensor:
        x = make(*args, **options)
        if not (x.is_meta or x.is_floating_point()):
            x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)
        return x

    return made


def _patch() -> None:
    triton.runtime.driver.set_active(_Driver())
    device.arch_of = lambda _: 90
    device.interpreting = lambda: True  # as far as tensors on a CPU are asked about
    tilewise.ops.launching_early = _early
    decode_step.GREEDY_ROWS = 16  # so that ranks of few rows have such steps
    torch.empty = _poisoned(torch.empty)  # type: ignore[assignment]
    torch.Tensor.new_empty = _poisoned(torch.Tensor.new_empty)  # type: ignore[method-assign]


def _model(start: Start) -> tuple[Decoder, ShardGroup | None]:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    config = ModelConfig.from_hf(_QWEN | dict(zip(names, start.heads, strict=True)) | start.fields)
    if start.size == 1:
        model = empty_model(config, "bfloat16", "cpu").eval().requires_grad_(False)
        if start.batch_invariant:
            model.use_invariant_linears()
        return model, None
    rank = start.size - 1
    group = ShardGroup(rank, start.size, CPU)
    model = empty_model(shards.shard_config(config, start.size), "bfloat16", "cpu").eval()
    shards._join(model, config, group)
    group.inbox = inbox.Inbox(
        rank, [16] * start.size, config.hidden_size, model.dtype, CPU,
        deals=shards._always_normalises(model),
    )  # fmt: skip
    return model.requires_grad_(False), group


class Both:
    """A start and its rehearsal, of one model."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._seqs, self._longest, self._tokens, block_size = start.limits
        self._model, self._group = _model(start)
        dtype = start.cache or self._model.dtype
        self._spec = cache_spec(self._model.config, block_size, dtype, self._longest)

    def new_runner(self) -> DeviceRunner:
        """Return a runner to rehearse."""
        runner = runner_to_rehearse(
            self._model, self._spec, CPU, max_num_seqs=self._seqs, max_model_len=self._longest,
            max_num_batched_tokens=self._tokens, batch_invariant=self._start.batch_invariant,
        )  # fmt: skip
        runner.sharing_tokens = 1 if self._start.shares else None
        return runner

    def rehearse(self) -> dict[str, Request]:
        """Return what the rehearsal notes."""
        runner = self.new_runner()
        with self._alone(), recording() as found:
            rehearse(runner, max_num_batched_tokens=self._tokens, is_lazy=self._start.is_lazy)
        return found

    def compile_ahead(self, processes: int, stamp: Path) -> None:
        """Rehearse, and compile in so many processes."""
        ahead._compile(
            self.new_runner, self._tokens, self._start.is_lazy, processes, stamp, self._group,
            lambda line, share=None: print(line, file=sys.stderr),
        )  # fmt: skip

    def prepare(self) -> None:
        """Start."""
        blocks = 3 * -(-self._longest // self._spec.block_size)
        storage = KVStorage(self._spec, [blocks] * len(self._spec.groups), CPU)
        runner = DeviceRunner(
            self._model, storage, max_num_seqs=self._seqs, max_model_len=self._longest,
            max_num_batched_tokens=self._tokens, batch_invariant=self._start.batch_invariant,
        )  # fmt: skip
        runner.sharing_tokens = 1 if self._start.shares else None
        with self._alone():
            graphs.prepare(runner, max_num_batched_tokens=self._tokens, is_lazy=self._start.is_lazy)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._group is None:
            yield
        else:
            with self._group.alone():
                yield


def tell_requests(name: str) -> dict[str, Any]:
    """Rehearse a start, then go through it; say what either would have compiled."""
    both = Both(STARTS[name])
    rehearsed = both.rehearse()
    with recording() as needed:
        both.prepare()
    names = {key: r.name for key, r in (rehearsed | needed).items()}
    return {"rehearsed": list(rehearsed), "needed": list(needed), "names": names}


def tell_start(name: str) -> dict[str, Any]:
    """Rehearse a start, compile in other processes, start; say what the start found on disk.

    After a slash in its name stand the kernels to be compiled, if not all: in one process then.
    """
    name, _, some = name.partition("/")
    both, chosen = Both(STARTS[name]), some.split(",")
    stamp, order, asked = Path(os.environ["TRITON_CACHE_DIR"], "stamp"), ahead.slowest_first, []

    def some_of(requests: list[Request]) -> list[Request]:
        asked[:] = [r for r in order(requests) if not some or r.name in chosen]
        return asked

    ahead.slowest_first = some_of  # type: ignore[assignment]
    both.compile_ahead(1 if some else 2, stamp)  # what a process begins with takes 1.5 s of a core
    hits, misses = list[str](), list[str]()

    def told(*, src: Any, cache_hit: bool, **_: Any) -> None:
        (hits if cache_hit else misses).append(src.name)

    triton.knobs.compilation.listener = told
    run, do_compile = JITFunction.run, JITFunction._do_compile

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    def compile_chosen(self: Any, *args: Any) -> Any:
        return do_compile(self, *args) if not some or self.fn.__name__ in chosen else None

    JITFunction.run, JITFunction._do_compile = only_compile, compile_chosen
    both.prepare()
    JITFunction.run, JITFunction._do_compile = run, do_compile
    return {
        "triton": triton.__version__, "asked": len(asked), "is_stamped": ahead._is_warm(stamp),
        "hits": hits, "misses": misses,
    }  # fmt: skip


def tell_names(order: str) -> dict[str, Any]:
    """Say under what some kernels are kept, in a process that meets them in this order."""
    modules = [importlib.import_module(f"tilewise.kernels.triton.step.{name}")
               for name in ("norm", "activation", "linear")]  # fmt: skip
    kernels = [modules[0]._norm_kernel, modules[1]._gated_mul_kernel, modules[2]._linear_kernel]
    if order == "backward":
        kernels.reverse()
    return {kernel.fn.__name__: kernel.cache_key for kernel in kernels}


def tell(what: str, names: list[str]) -> None:
    """Print a line of JSON for each name."""
    _patch()
    tell_of = {"requests": tell_requests, "start": tell_start, "names": tell_names}[what]
    with on_hopper(None):
        for name in names:
            print(json.dumps({"start": name, **tell_of(name)}), flush=True)


def serve() -> None:
    """Answer lines [requests|start|names, names, Triton's cache] with [status, output, errors].

    Each is done by a process of its own that is forked from this one, which has imported all and
    done nothing else.
    """
    for line in sys.stdin:
        what, names, cache = json.loads(line)
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    os.dup2(output.fileno(), 1)
                    os.dup2(errors.fileno(), 2)
                    os.environ["TRITON_CACHE_DIR"] = cache
                    tell(what, names)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            _, status = os.waitpid(pid, 0)
            output.seek(0)
            errors.seek(0)
            print(json.dumps([status, output.read(), errors.read()]), flush=True)


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "0", "the interpreter compiles nothing"
    serve()
