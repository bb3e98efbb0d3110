"""Usage of each key since the start."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Ledger"]


@dataclass(slots=True)
class _Account:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    refused: int = 0


class Ledger:
    """The usage accounts of all keys, by the key's name; a server has one."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def add(
        self, name: str, *, prompt: int, cached: int, generated: int, preempted: int, refused: int
    ) -> None:
        """Add one request to the account of a key.

        Args:
            name: the name of the key.
            prompt, cached, generated: the request's numbers of tokens.
            preempted, refused: the request's numbers of preemptions and refusals.
        """
        account = self._accounts.setdefault(name, _Account())
        account.requests += 1
        account.prompt_tokens += prompt
        account.cached_tokens += cached
        account.generated_tokens += generated
        account.preemptions += preempted
        account.refused += refused

    def of(self, name: str) -> dict[str, Any]:
        """Return a key's account: its name and its counts, which are 0 for an unknown key."""
        return {"key": name, **asdict(self._accounts.get(name, _Account()))}

    @property
    def all(self) -> list[dict[str, Any]]:
        """The accounts of all keys that have sent requests, by name."""
        return [self.of(name) for name in sorted(self._accounts)]
