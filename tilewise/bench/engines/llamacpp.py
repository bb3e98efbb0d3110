"""llama.cpp in the benchmark: parallel sequences in one llama_batch, ids in and ids out.

Greedy only. The context of a number of sequences is made once, outside of what is timed, and
emptied for each call. Logits are read where llama.cpp wrote them.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

__all__ = ["Measured"]

_MICRO_BATCH = 512  # tokens of a prompt that are multiplied together, llama.cpp's own default


class Measured:
    """llama.cpp, through llama-cpp-python on a CPU, as a `worker.Engine` of the benchmark.

    Args:
        settings: "gguf" (the model's file), "threads" (None is one a core), and those of
            `ours.Measured`.

    Raises:
        ImportError: llama-cpp-python is not installed.
        ValueError: the file is no model that llama.cpp loads.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        try:
            import llama_cpp
            import numpy
        except ImportError as error:
            raise ImportError(
                "this peer needs llama-cpp-python: pip install llama-cpp-python"
            ) from error
        self.lib: Any = llama_cpp
        self.numpy: Any = numpy
        self.max_len: int = settings["max_len"]
        self.sequences, self.context = 0, None
        self.threads = settings.get("threads") or os.cpu_count() or 1
        self.lib.llama_backend_init()
        params = self.lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = self.lib.llama_model_load_from_file(settings["gguf"].encode(), params)
        if not self.model:
            raise ValueError(f"gguf must be a model that llama.cpp loads, got {settings['gguf']!r}")
        vocab = self.lib.llama_model_get_vocab(self.model)
        self.vocab_size: int = self.lib.llama_vocab_n_tokens(vocab)

    def facts(self) -> dict[str, Any]:
        """Return the version of llama-cpp-python, and llama.cpp's text about its build."""
        build = self.lib.llama_print_system_info().decode()
        return {"version": self.lib.__version__, "build": build}

    def profile(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return {}: only our own engine is looked into."""
        return {}

    def generate(
        self, prompts: list[list[int]], new_tokens: list[int], temperature: float, n: int
    ) -> list[list[int]]:
        """Return the new token ids of each prompt; all prompts decode together, greedily.

        A new context is made if the number of prompts has changed.

        Raises:
            ValueError: temperature is not 0, n is not 1, or the answers differ in length.
        """
        if temperature != 0 or n != 1 or len(set(new_tokens)) != 1:
            raise ValueError("llama.cpp is measured on greedy answers of one length")
        if len(prompts) != self.sequences:
            self._renew_context(len(prompts))
        context = self.context
        self.lib.llama_memory_clear(self.lib.llama_get_memory(context), False)
        size = max(_MICRO_BATCH, len(prompts))
        batch = _Rows(self.lib, self.numpy, size)
        last = self._prefill(context, batch, size, prompts)
        out = [[token] for token in last]
        ids = self.numpy.arange(len(prompts))
        ends = self.numpy.array([len(prompt) for prompt in prompts])
        every = self.numpy.ones(len(prompts), dtype=bool)
        for step in range(new_tokens[0] - 1):
            tokens = self.numpy.array(last)
            last = self._decode(context, batch, tokens, ends + step, ids, every)
            for row, token in zip(out, last, strict=True):
                row.append(token)
        return out

    def _renew_context(self, sequences: int) -> None:
        if self.context is not None:
            self.lib.llama_free(self.context)
        params = self.lib.llama_context_default_params()
        # The tokens of a context are shared out among its sequences, in multiples of 256.
        params.n_ctx = sequences * (-(-self.max_len // 256) * 256)
        params.n_batch = max(_MICRO_BATCH, sequences)
        params.n_ubatch = max(_MICRO_BATCH, sequences)
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self.threads
        self.sequences = sequences
        self.context = self.lib.llama_init_from_model(self.model, params)
        if not self.context:
            self.sequences, self.context = 0, None
            raise MemoryError(f"llama.cpp must have room for {sequences} x {self.max_len} tokens")

    def _prefill(
        self, context: Any, batch: _Rows, size: int, prompts: list[list[int]]
    ) -> list[int]:
        """Compute all prompts in batches of `size` tokens; return each one's first new token."""
        np = self.numpy
        tokens = np.concatenate([np.array(prompt) for prompt in prompts])
        positions = np.concatenate([np.arange(len(prompt)) for prompt in prompts])
        sequences = np.repeat(np.arange(len(prompts)), [len(prompt) for prompt in prompts])
        ends = np.zeros(len(tokens), dtype=bool)
        ends[np.cumsum([len(prompt) for prompt in prompts]) - 1] = True
        last: list[int] = []
        for first in range(0, len(tokens), size):
            part = slice(first, first + size)
            rows = (tokens[part], positions[part], sequences[part], ends[part])
            last += self._decode(context, batch, *rows)
        return last

    def _decode(
        self, context: Any, batch: _Rows, tokens: Any, positions: Any, sequences: Any, sampled: Any
    ) -> list[int]:
        """Run one llama_batch of rows (token, position, sequence, is sampled); return the most
        likely next token of each sampled row.

        Raises:
            RuntimeError: llama_decode reports an error.
        """
        batch.fill(tokens, positions, sequences, sampled)
        status = self.lib.llama_decode(context, batch.struct)
        if status != 0:
            raise RuntimeError(f"llama_decode must return 0, got {status}")
        found = []
        for at in self.numpy.flatnonzero(sampled):
            address = self.lib.llama_get_logits_ith(context, int(at))
            pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
            logits = self.numpy.ctypeslib.as_array(pointer, shape=(self.vocab_size,))
            found.append(int(logits.argmax()))
        return found


class _Rows:
    """A llama_batch of at most `size` rows over arrays of numpy, which `fill` sets at once, not
    element by element."""

    def __init__(self, lib: Any, np: Any, size: int) -> None:
        self.tokens, self.positions, self.sequences = (np.zeros(size, np.int32) for _ in range(3))
        self.counts = np.ones(size, np.int32)  # sequences of a token
        self.sampled = np.zeros(size, np.int8)
        steps = np.arange(size, dtype=np.uint64) * self.sequences.itemsize
        self.pointers = steps + np.uint64(self.sequences.ctypes.data)
        self.struct: Any = lib.llama_batch()
        arrays = (self.tokens, self.positions, self.counts, self.pointers, self.sampled)
        fields = ("token", "pos", "n_seq_id", "seq_id", "logits")
        kinds = dict(self.struct._fields_)
        for name, array in zip(fields, arrays, strict=True):
            setattr(self.struct, name, ctypes.cast(array.ctypes.data, kinds[name]))

    def fill(self, tokens: Any, positions: Any, sequences: Any, sampled: Any) -> None:
        """Set the rows of the next llama_decode: arrays of equal length."""
        count = len(tokens)
        self.struct.n_tokens = count
        self.tokens[:count] = tokens
        self.positions[:count] = positions
        self.sequences[:count] = sequences
        self.sampled[:count] = sampled
