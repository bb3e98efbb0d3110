"""Descriptions of texts compiled for a trial, in processes that can be ended.

llguidance compiles in bounded steps, except for numbers: `{"multipleOf": 999999937}` takes hours,
and a thread cannot be stopped. So a description is first compiled in another process, which the
system ends when its time or memory is used up; only descriptions that compile there are compiled
in this process. A trial waits for its turn. No user gets all processes, nor more than a bounded
share of their time in a minute.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tilewise.children import FROM_OUTSIDE, answer, ask, end, environment
from tilewise.errors import QueueFullError, RequestError

__all__ = ["LONGEST_ERROR", "Trials", "grammar_of", "limits_of", "refusal_of"]

PROCESSES = 2
CPU_SECONDS = 2  # of one trial; 900 optional properties take a tenth of a second
MEMORY = 2**30  # bytes that a trial may add to what the tokenizer takes
TRIAL_SECONDS = 30.0  # by the clock, on a machine whose processors others use
WAIT_SECONDS = 20.0  # for a turn
MOST, MOST_OF_A_USER = 256, 64  # descriptions that wait for one
START_SECONDS = 60.0
MINUTE_S = 60.0
MINUTES_SECONDS = 20.0  # of a processor that the descriptions of one user may take in a minute
LONGEST_ERROR = 1000  # characters
MAX_FAILED = 128  # descriptions of which it is known that they fail
# Between the tokens of JSON, where its schema says nothing else: a line's end and its indentation.
# With any amount, a weak model writes line ends until its tokens are used up.
WHITESPACE = r"\n? {0,16}"
# Where a text can go on in one way alone, llguidance walks that way to its end before it makes a
# mask, and no count bounds it: ((a{1000}){1000}){1000} held a step for 52 s of CPU time, and with
# it all requests. This stands behind a grammar, as of several such lines the last one counts.
UNFORCED = '\n%llguidance {"no_forcing": true}\n'
# Counts of llguidance: half a second of building a lexer (50,000 units a millisecond), 60,000
# symbols, 50,000 states of some 1.5 kB, and 14 ms (14,000 a millisecond) of work for one mask. A
# row has four items for each optional property of an object: 900 of these take 8 ms.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 25_000_000,
    "max_grammar_size": 60_000,
    "max_lexer_states": 50_000,
    "max_items_in_row": 4_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "verbose_errors": False,
}
Asked = tuple[str, str, str | None]  # kind, description and lead
START = "from tilewise.engine import trials; trials.work()"  # what a process runs


def grammar_of(library: Any, kind: str, description: str, lead: str | None = None) -> str:
    """Return a description as a grammar of llguidance.

    Args:
        lead: a grammar of what stands before the text that the description is of, which it names
            `@text`; None where the text is that from its beginning.

    Raises:
        ValueError: the description is wrong.
    """
    grammar = _plain_grammar(library, kind, description) + UNFORCED
    if lead is None:
        return grammar
    parts = {"lead": lead + UNFORCED, "text": grammar}
    grammars = [{"name": name, "lark_grammar": part} for name, part in parts.items()]
    return json.dumps({"grammars": grammars})


def _plain_grammar(library: Any, kind: str, description: str) -> str:
    if kind == "choice":
        texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(description))
        return "start: " + " | ".join(texts)
    if kind == "json":
        made = library.LLMatcher.grammar_from_json_schema(
            description, defaults={"whitespace_pattern": WHITESPACE}
        )
        [one] = json.loads(made)["grammars"]
        return f"start: %json {json.dumps(one['json_schema'])}"
    grammar: str = library.grammar_from(kind, description)
    if kind == "regex":
        [one] = json.loads(grammar)["grammars"]
        grammar = one["lark_grammar"]
    return grammar


def refusal_of(kind: str, reason: str) -> RequestError:
    """Return the RequestError for a description that does not compile, with at most 1,000
    characters of the reason."""
    return RequestError(f"{kind} must compile, got an error: {reason[:LONGEST_ERROR]}")


def limits_of(library: Any) -> Any:
    """Return llguidance's limits on the work that a grammar may cost."""
    return library.LLParserLimits(**LIMITS)


class Trials:
    """Compiles descriptions of texts in other processes, to refuse those that cost too much.

    Threads may share it.

    Args:
        tokenizer_json, vocab_size, end_ids: see `structured.Grammars`.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._tokenizer = [tokenizer_json, vocab_size, list(end_ids)]
        self._changed = threading.Condition()
        self._waiting: list[tuple[str, object]] = []
        self._running = Counter[str]()
        self._spent: dict[str, deque[tuple[float, float]]] = {}
        self._failed: dict[Asked, str] = {}
        self._idle: list[subprocess.Popen[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        weakref.finalize(self, _end_all, self._processes)

    @contextmanager
    def passed(
        self, kind: str, description: str, user: str, lead: str | None = None
    ) -> Iterator[None]:
        """Compile a description in another process; in the `with` block the caller compiles it
        here.

        The turn is held until the block ends. A description that used up its time of a processor or
        its memory is remembered, and later refused without a turn.

        Args:
            kind: the form of the description: "json", "regex", "choice" or "grammar".
            description: the description as text, see `StructuredOutputs.description`.
            user: the user who asks; "" is no particular user, whose trials share no bound.
            lead: see `grammar_of`.

        Raises:
            RequestError: the description is wrong, or takes too much time or memory.
            QueueFullError: the turn has not come for long, or the user has had his time.
            RuntimeError: the processes were ended from outside, twice.
        """
        asked = kind, description, lead
        self._check_known(asked)
        with self._turn(user):
            self._check_known(asked)  # another user may have asked for it meanwhile
            found = self._tried(asked, user) or self._tried(asked, user)
            if found is None:
                raise RuntimeError("the process that compiles grammars was ended from outside")
            if "error" in found:
                raise refusal_of(kind, found["error"])
            yield

    def _check_known(self, asked: Asked) -> None:
        known = self._failed.get(asked)
        if known is not None:
            raise RequestError(known)

    @contextmanager
    def _turn(self, user: str) -> Iterator[None]:
        """Wait for a turn to compile, and hold it during the `with` block.

        The next turn goes to the waiting user who holds the fewest. One process is left for others.

        Raises:
            QueueFullError: too many wait, this one has waited too long, or the user's time is
                spent.
        """
        mine = (user, object())
        until = time.monotonic() + WAIT_SECONDS
        with self._changed:
            self._check_spent(user)
            own = sum(one == user for one, _ in self._waiting)
            for waiting, most in (
                (own, MOST_OF_A_USER if user else MOST),
                (len(self._waiting), MOST),
            ):
                if waiting >= most:
                    raise QueueFullError(
                        f"descriptions that wait to be compiled must be at most {most}, "
                        f"got {waiting + 1}"
                    )
            self._waiting.append(mine)
            try:
                while not self._is_next(mine):
                    if not self._changed.wait(max(0.0, until - time.monotonic())):
                        raise QueueFullError(
                            f"descriptions must wait for their turn at most {WAIT_SECONDS:g} s, "
                            f"got one behind {len(self._waiting) - 1} others"
                        )
                self._check_spent(user)
                self._running[user] += 1
            finally:
                self._waiting.remove(mine)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._running -= Counter([user])
                self._changed.notify_all()

    def _is_next(self, mine: tuple[str, object]) -> bool:
        if self._running.total() >= PROCESSES:
            return False
        # One process is always left for others.
        able = [one for one in self._waiting if not one[0] or self._running[one[0]] < PROCESSES - 1]
        return bool(able) and min(able, key=lambda one: self._running[one[0]]) is mine

    def _check_spent(self, user: str) -> None:
        spent = self._spent.get(user, deque())
        while spent and spent[0][0] < time.monotonic() - MINUTE_S:
            spent.popleft()
        total = sum(seconds for _, seconds in spent)
        if total > MINUTES_SECONDS:
            raise QueueFullError(
                f"descriptions of one user must take at most {MINUTES_SECONDS:g} s of a processor "
                f"in a minute, got {total:.0f} s"
            )
        if not spent:
            self._spent.pop(user, None)

    def _tried(self, asked: Asked, user: str) -> dict[str, Any] | None:
        """Return a process's answer: its "seconds" and, if the description is wrong, the "error".

        None if the process was ended from outside. The seconds count for the user.

        Raises:
            RequestError: the description took too much time or memory, which ended the process.
        """
        worker = self._taken()
        found: dict[str, Any] | None = None
        why = f"within {CPU_SECONDS} s of a processor"
        try:
            found = ask(worker, [*asked], TRIAL_SECONDS)
        except TimeoutError:  # the machine may be at fault, so it is not noted
            end(worker)
            raise RequestError(
                f"{asked[0]} must compile within {TRIAL_SECONDS:g} s, got one that does not"
            ) from None
        except OSError:
            code = end(worker, is_ending=True)
            if code in FROM_OUTSIDE:
                return None
            if code != -signal.SIGXCPU:
                why = f"within {MEMORY >> 20} MiB"
        except BaseException:
            end(worker)
            raise
        finally:
            with self._changed:
                if found is not None:
                    self._idle.append(worker)
                else:
                    self._processes.remove(worker)
        spent = float(CPU_SECONDS) if found is None else float(found["seconds"])
        with self._changed:
            if user:
                self._spent.setdefault(user, deque()).append((time.monotonic(), spent))
            if found is None:
                message = f"{asked[0]} must compile {why}, got one that does not"
                self._failed[asked] = message
                if len(self._failed) > MAX_FAILED:
                    del self._failed[next(iter(self._failed))]
                raise RequestError(message)
        return found

    def _taken(self) -> subprocess.Popen[bytes]:
        """Return an idle process; if there is none, start one and give it the tokenizer.

        Raises:
            RuntimeError: the process did not start.
        """
        with self._changed:
            while self._idle:
                worker = self._idle.pop()
                if worker.poll() is None:
                    return worker
                self._processes.remove(worker)
                end(worker)
            worker = subprocess.Popen(
                [sys.executable, "-P", "-c", START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment(),
                start_new_session=True,  # an interrupt of the terminal is the engine's business
            )
            self._processes.append(worker)
        try:
            ask(worker, self._tokenizer, START_SECONDS)
        except BaseException as error:
            with self._changed:
                self._processes.remove(worker)
            end(worker)
            if isinstance(error, OSError):  # a TimeoutError is one
                message = f"the process that compiles grammars did not start: {error or 'too late'}"
                raise RuntimeError(message) from None
            raise
        return worker


def _end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    for worker in processes:
        with suppress(OSError):
            end(worker)


def work() -> None:
    """Run as a process of `Trials`: compile the description (kind, description, lead) in each line
    of standard input, and answer with the error, if there is one, and the seconds of CPU time,
    until the input ends.

    The first line is the tokenizer, which is answered once it is loaded. The memory of the process
    is limited once, its CPU time anew for each description; beyond a limit the process ends.
    """
    import resource

    import llguidance

    lines = sys.stdin.buffer
    tokenizer_json, vocab_size, end_ids = json.loads(lines.readline())
    library: Any = llguidance
    tokenizer = library.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=end_ids)
    limits = limits_of(library)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError), open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    answer({})
    while line := lines.readline():
        asked: Asked = tuple(json.loads(line))
        begun = time.process_time()
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        limit = int(begun) + 1 + CPU_SECONDS
        if most != resource.RLIM_INFINITY:
            limit = min(limit, most)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, most))
        said = _compiled(library, tokenizer, limits, asked)
        answer({**said, "seconds": time.process_time() - begun})


def _compiled(library: Any, tokenizer: Any, limits: Any, asked: Asked) -> dict[str, Any]:
    try:
        grammar = grammar_of(library, *asked)
    except ValueError as error:
        return {"error": str(error)}
    state = library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    return {"error": state.get_error()} if state.is_error() else {}
