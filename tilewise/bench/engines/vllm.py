"""vLLM in the benchmark: its offline class with CUDA graphs and torch.compile, in one process."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["ENVIRONMENT", "SERVER_ENVIRONMENT", "Measured"]

# One process without a network, the sampler that needs nothing compiled, and no calls home.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_MOE_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}
# Of its server, whose engine is a process of its own.
SERVER_ENVIRONMENT = {
    name: value for name, value in ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"
}


class Measured:
    """vLLM's offline class as a `worker.Engine` of the benchmark.

    Args:
        settings: the settings of `ours.Measured`.

    Raises:
        ImportError: vLLM is not installed.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            import vllm
        except ImportError as error:
            raise ImportError(f"this peer needs vllm: {error}") from error
        self.vllm: Any = vllm
        cache_dtype = settings.get("kv_cache_dtype")
        options: dict[str, Any] = {}
        if cache_dtype is not None:
            options["kv_cache_dtype"] = {"fp8_e4m3": "fp8"}.get(cache_dtype, cache_dtype)
        if settings.get("max_num_batched_tokens"):
            options["max_num_batched_tokens"] = settings["max_num_batched_tokens"]
        self.llm: Any = vllm.LLM(
            model=settings["directory"],
            load_format="dummy" if settings["random_weights"] else "auto",
            skip_tokenizer_init=True,
            dtype=settings["dtype"],
            max_model_len=settings["max_len"],
            max_num_seqs=settings["max_num_seqs"],
            gpu_memory_utilization=settings["memory"],
            enable_prefix_caching=settings["prefix_caching"],
            disable_log_stats=True,
            generation_config="vllm",
            attention_config={"backend": "FLASH_ATTN"},
            seed=0,
            **options,
        )

    def facts(self) -> dict[str, Any]:
        """Return by name the versions of vLLM and torch."""
        import torch

        return {"version": self.vllm.__version__, "torch": torch.__version__}

    def profile(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return {}: only our own engine is looked into."""
        return {}

    def generate(
        self, prompts: list[list[int]], new_tokens: list[int], temperature: float, n: int
    ) -> list[list[int]]:
        """Return the new token ids of each prompt's first sample, when all samples are done."""
        params = [
            self.vllm.SamplingParams(
                n=n, temperature=temperature, ignore_eos=True, max_tokens=count, detokenize=False
            )
            for count in new_tokens
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
