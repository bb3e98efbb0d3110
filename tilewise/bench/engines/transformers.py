"""transformers in the benchmark: `generate` on one padded batch, or its continuous batching."""

from __future__ import annotations

from typing import Any, cast

import torch

__all__ = ["Measured"]


class Measured:
    """transformers as a `worker.Engine` of the benchmark.

    Args:
        settings: the settings of `ours.Measured`; "engine" is "transformers" for `generate`, or
            "transformers_cb" for `ContinuousBatchingManager` over paged attention.

    Raises:
        ImportError: transformers is not installed.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        try:
            import transformers
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            raise ImportError("this peer needs transformers: pip install transformers") from error
        if settings.get("threads"):
            torch.set_num_threads(settings["threads"])
        self.version: str = transformers.__version__
        self.device: str = settings["device"]
        self.is_continuous: bool = settings["engine"] == "transformers_cb"
        self.sampled_as: float | None = None
        dtype = getattr(torch, settings["dtype"])
        directory = settings["directory"]
        attention = "paged|sdpa" if self.is_continuous else "sdpa"
        if settings["random_weights"]:
            config = AutoConfig.from_pretrained(directory)
            with torch.device(self.device):
                model = cast(Any, AutoModelForCausalLM).from_config(config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self.model: Any = model.to(self.device).eval()
        self.model.set_attn_implementation(attention)
        self.attention = attention
        self.shares_prefixes: bool = settings["prefix_caching"]

    def facts(self) -> dict[str, Any]:
        """Return by name the versions of transformers and torch, and which attention runs."""
        return {"version": self.version, "torch": torch.__version__, "attention": self.attention}

    def profile(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return {}: only our own engine is looked into."""
        return {}

    def generate(
        self, prompts: list[list[int]], new_tokens: list[int], temperature: float, n: int
    ) -> list[list[int]]:
        """Return the new token ids of each prompt's first sample, when all samples are done."""
        run = self._continuous if self.is_continuous else self._padded
        return run(prompts, new_tokens, temperature, n)

    def _padded(
        self, prompts: list[list[int]], new_tokens: list[int], temperature: float, n: int
    ) -> list[list[int]]:
        """Return the new token ids of each prompt's first sample by `generate`.

        All prompts, padded on the left, run for the most new tokens that one of them needs; each
        answer is cut to its own number.
        """
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor(
            [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device
        )
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                min_new_tokens=max(new_tokens),
                max_new_tokens=max(new_tokens),
                num_return_sequences=n,
                pad_token_id=0,
                **sampling,
            )
        rows: list[list[int]] = out[::n, longest:].tolist()
        return [row[:count] for row, count in zip(rows, new_tokens, strict=True)]

    def _continuous(
        self, prompts: list[list[int]], new_tokens: list[int], temperature: float, n: int
    ) -> list[list[int]]:
        """Return the new token ids of each prompt by transformers' continuous batching, which gets
        each prompt as a request with its own number of new tokens.

        Raises:
            ValueError: n is not 1.
            RuntimeError: the manager's thread has ended too early.
        """
        from transformers import ContinuousBatchingConfig, GenerationConfig

        if n != 1:
            raise ValueError(f"transformers' continuous batching is measured with n = 1, got {n}")
        config = cast(Any, GenerationConfig)(
            max_new_tokens=max(new_tokens),
            do_sample=temperature > 0,
            temperature=temperature if temperature > 0 else 1.0,
            top_k=0 if temperature > 0 else 50,
            eos_token_id=-1,
            pad_token_id=0,
        )
        if self.sampled_as != temperature:
            # The manager, its cache and its graphs stay for all calls that sample alike.
            self.model.destroy_cached_continuous_batching_manager()
            self.sampled_as = temperature
        answers: dict[str, list[int]] = {}
        # The same prompts come again and again: a prefix cache would have them all.
        batching = cast(Any, ContinuousBatchingConfig)(allow_block_sharing=self.shares_prefixes)
        with self.model.continuous_batching_context_manager(
            generation_config=config,
            continuous_batching_config=batching,
            persistent_manager=True,
        ) as manager:
            for i, (prompt, count) in enumerate(zip(prompts, new_tokens, strict=True)):
                manager.add_request(prompt, request_id=str(i), max_new_tokens=count)
            while len(answers) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    answers[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("the manager's thread ended before its requests did")
        return [answers[str(i)] for i in range(len(prompts))]
