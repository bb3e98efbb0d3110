"""Beam search: choose the continuations that live on after each step, and keep the best ended. No
torch.

A beam is a sequence of the roster like any other: it runs in the same steps, shares the blocks of
common tokens with others of its request, and may be preempted. The search needs one row of
log-probabilities of each beam. When it has all rows, it ends one logical step: the best of all
continuations end or live on. A beam that is continued twice is forked, one that is not continued
releases its blocks (`Scheduler`).

A beam whose row is known rests until the rows of the others are. If not all have seats or blocks,
they run in turns: a resting beam makes way for one that has yet to run, and is recomputed later.
Its row is kept, so that nothing is chosen twice.

Scores are sums of float32 log-probabilities in Python's float. Of equal scores the continuation of
the better beam comes first, then the lower token; of equal ended ones the one that ended first. The
rules are those of `transformers` 5 (`generate(num_beams=)`): a continuation ends if it is among the
beam_width best ones, and its score is divided by length**length_penalty, its last token counted.

Source: the algorithm as transformers 5 has it; Kwon et al. 2023, "Efficient Memory Management for
LLM Serving with PagedAttention", section 4.4, for beams that share blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import ClassVar, NamedTuple

from tilewise.engine.batch import SampledToken, TokenEvent
from tilewise.engine.request import FinishReason, Request, SamplingParams, Sequence
from tilewise.engine.scheduling.roster import Roster
from tilewise.engine.tables.block_tables import BlockTables
from tilewise.errors import is_integer, is_number, shown

__all__ = ["MAX_BEAM_WIDTH", "BeamSearch", "BeamSearchParams", "Beams", "Branch"]

MAX_BEAM_WIDTH = 256  # more is a denial of service, not a workload
MAX_END_IDS = 64  # each is one more log-probability of each row, and of each beam


@dataclass(frozen=True, slots=True, init=False)
class BeamSearchParams(SamplingParams):
    """Search for the most likely continuations instead of sampling them.

    Names and rules are those of transformers' `generate(num_beams=beam_width)`. All beam_width
    continuations are returned, the best first; cumulative_logprob is the sum of their
    log-probabilities, `score` the value by which they were ordered. There is no text before the
    end.

    Attributes:
        beam_width: the number of continuations that are kept, 1 to 256 and at most the vocabulary.
            It may exceed max_num_seqs: beams then run in turns.
        length_penalty: the exponent of the length in the score of an ended continuation: its
            cumulative log-probability is divided by length**length_penalty. Values above 0 prefer
            long ones.
        early_stopping: the condition of the end. True ends as soon as beam_width continuations have
            ended; False when the best live one, at its length, is not better than the worst of
            them; "never" when it could not become better at its greatest length either.
        max_tokens: the largest number of new tokens; None for the model's context.
        stop_token_ids: at most 64 token ids that end a continuation, beside the model's end token.
        skip_special_tokens: True to leave special tokens out of the text.
        ignore_eos: True to continue after the model's end token.
        logprobs: the number of most likely tokens whose log-probabilities are reported, beside the
            token's own; None reports none.

    Raises:
        TypeError: a value is not of its type; the message names it.
        ValueError: a value is outside its range; the message names it.

    Example:
        >>> [output] = llm.generate("Once upon a time", BeamSearchParams(4, max_tokens=32))
        >>> best = output.outputs[0]
    """

    beam_width: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __init__(
        self,
        beam_width: int = 4,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        max_tokens: int | None = 16,
        stop_token_ids: list[int] | tuple[int, ...] | None = None,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        skip_special_tokens: bool = True,
        **others: object,
    ) -> None:
        self._check_others(others)
        if not is_integer(beam_width):
            raise TypeError(f"beam_width must be an integer, got {shown(beam_width)}")
        if not 1 <= beam_width <= MAX_BEAM_WIDTH:
            raise ValueError(
                f"beam_width must be in 1 ... {MAX_BEAM_WIDTH}, got {shown(beam_width)}"
            )
        if not is_number(length_penalty):
            raise TypeError(f"length_penalty must be a number, got {shown(length_penalty)}")
        if not -1e3 <= length_penalty <= 1e3:
            raise ValueError(
                f"length_penalty must be in -1000 ... 1000, got {shown(length_penalty)}"
            )
        is_never = isinstance(early_stopping, str) and early_stopping == "never"
        if not isinstance(early_stopping, bool) and not is_never:
            raise ValueError(
                f"early_stopping must be True, False or 'never', got {shown(early_stopping)}"
            )
        object.__setattr__(self, "beam_width", int(beam_width))
        object.__setattr__(self, "length_penalty", float(length_penalty))
        object.__setattr__(self, "early_stopping", early_stopping)
        SamplingParams.__init__(
            self,
            temperature=0.0,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            skip_special_tokens=skip_special_tokens,
        )
        if len(stop_token_ids or ()) > MAX_END_IDS:
            raise ValueError(
                f"stop_token_ids must be at most {MAX_END_IDS} ids in a beam search, "
                f"got {len(stop_token_ids or ())}"
            )

    @staticmethod
    def _check_others(others: Mapping[str, object]) -> None:
        """Refuse sampling arguments that a beam search does not take, unless they have the values
        of every beam search: temperature 0, and the defaults of `SamplingParams` for all others.

        dataclasses.replace() passes all arguments of `SamplingParams`.

        Raises:
            TypeError: there is no argument of that name.
            ValueError: an argument has another value.
        """
        known = {f.name: f.default for f in fields(SamplingParams)} | {"temperature": 0.0}
        for name, value in others.items():
            if name not in known:
                raise TypeError(f"BeamSearchParams must have arguments that it knows, got {name}")
            left = known[name]
            if value is not left and not (isinstance(value, Real) and value == left):
                raise ValueError(f"{name} must be {left!r} in a beam search, got {shown(value)}")

    @property
    def num_samples(self) -> int:
        """The number of beams, and of continuations that are returned: beam_width."""
        return self.beam_width

    def for_rows(self, end_ids: frozenset[int]) -> SamplingParams:
        """Return the parameters by which a runner processes each beam's row of logits.

        They ask for the log-probabilities of all tokens that the search can need.

        The best beam_width tokens of a row may end; of those that do not, the best beam_width may
        live on. Both are among the best beam_width + (number of end tokens).
        """
        num_ends = sum(token >= 0 for token in end_ids)
        return _Candidates(
            temperature=0.0, logprobs=max(self.beam_width + num_ends, self.logprobs or 0)
        )

    def score(self, cumulative_logprob: float, num_tokens: int) -> float:
        """Return the score of an ended continuation: its sum / num_tokens**length_penalty.

        Args:
            cumulative_logprob: the sum of the log-probabilities of its tokens.
            num_tokens: the number of its tokens, the last one included.
        """
        try:
            return float(cumulative_logprob / num_tokens**self.length_penalty)
        except (OverflowError, ZeroDivisionError):  # of the power: the longest are far away
            return 0.0 if self.length_penalty > 0 else -float("inf")


class _Candidates(SamplingParams):
    """The sampling parameters of a beam: they allow more log-probabilities than a user may
    request."""

    __slots__ = ()
    most_logprobs: ClassVar[int] = 2**31


class _Path(NamedTuple):
    """The generated tokens of a beam, as a linked list from the last token; beams share common
    parts."""

    before: _Path | None
    token: SampledToken

    def tokens(self) -> list[SampledToken]:
        """Return the generated tokens of the beam, the first one first."""
        found, path = [], self
        while True:
            found.append(path.token)
            if path.before is None:
                return found[::-1]
            path = path.before


@dataclass(slots=True)
class _Beam:
    """A live continuation of a beam search.

    Attributes:
        seq: the sequence of the roster that computes the beam.
        parent: the index, among the beams of the step before, of the beam that this one continues.
        score: the sum of the log-probabilities of its generated tokens.
        path: the generated tokens; None before the first.
        row: the most likely next tokens with their log-probabilities; None until they are computed.
    """

    seq: Sequence
    parent: int = 0
    score: float = 0.0
    path: _Path | None = None
    row: SampledToken | None = None


class _Ended(NamedTuple):
    score: float
    path: _Path
    token_id: int
    is_end_token: bool


class Branch(NamedTuple):
    """A beam after the next step of the search: an existing sequence and a token appended to it.

    Attributes:
        parent: the sequence of the beam that is continued; several branches may have the same one.
        token_id: the appended token.
    """

    parent: Sequence
    token_id: int


class BeamSearch:
    """The state of one beam search: its live beams, and the best continuations that have ended.

    Args:
        request: a request whose sampling is BeamSearchParams.
        first: the sequence that computes the prompt.
        max_len: the number of tokens, prompt and generated, at which a continuation ends.
    """

    def __init__(self, request: Request, first: Sequence, max_len: int) -> None:
        assert isinstance(request.sampling, BeamSearchParams)
        self.params = request.sampling
        self.request = request
        self._max_len = max_len
        self._num_prompt_tokens = first.num_prompt_tokens
        self._beam_of: dict[Sequence, _Beam] = {first: _Beam(first)}  # the best first
        self._next: list[_Beam] = []
        self._ended: list[_Ended] = []  # the best first

    def is_resting(self, seq: Sequence) -> bool:
        """Return whether a beam has its row of log-probabilities, and waits for those of other
        beams."""
        return self._beam_of[seq].row is not None

    def take(self, seq: Sequence, row: SampledToken) -> bool:
        """Store the log-probabilities of a beam's next token; return whether all beams have theirs
        now."""
        self._beam_of[seq].row = row
        return all(beam.row is not None for beam in self._beam_of.values())

    def order(self, family: list[Sequence]) -> list[Sequence]:
        """Return the beams of a request in the order in which they are to run.

        First beams with blocks that grow, then resting ones, then beams without blocks; equal ones
        keep their order. The last beams with blocks are preempted first.
        """
        return sorted(family, key=lambda seq: (not seq.block_ids, self.is_resting(seq)))

    def choose(self) -> list[Branch]:
        """End the best continuations that end; return branches for the others, the best first.

        An empty list says that the search is done, see `events`.

        The next tokens of all beams must be known. Call `follow` with the sequences of these
        branches afterwards.
        """
        beams = list(self._beam_of.values())
        length = beams[0].seq.num_tokens + 1 - self._num_prompt_tokens
        is_last = beams[0].seq.num_tokens + 1 >= self._max_len
        width, end_ids = self.params.beam_width, self.request.end_ids
        found: list[tuple[float, int, int, float]] = []
        for rank, beam in enumerate(beams):
            assert beam.row is not None
            found += [(-beam.score - x, rank, token, x) for token, x in beam.row.top_logprobs]
        found.sort()
        self._next, branches = [], list[Branch]()
        for place, (loss, rank, token_id, logprob) in enumerate(found):
            if place >= width and (is_last or len(branches) == width):
                break
            beam, is_end_token = beams[rank], token_id in end_ids
            if is_end_token or is_last:
                if place < width:
                    path = self._path(beam, token_id, logprob)
                    score = self.params.score(-loss, length)
                    self._ended.append(_Ended(score, path, token_id, is_end_token))
            elif len(branches) < width:
                path = self._path(beam, token_id, logprob)
                self._next.append(_Beam(beam.seq, rank, -loss, path))
                branches.append(Branch(beam.seq, token_id))
        self._ended.sort(key=lambda ended: -ended.score)  # stable: the first to end stays first
        del self._ended[width:]
        if self._is_done(length):
            branches = []
        return branches

    def follow(self, sequences: list[Sequence]) -> list[Sequence]:
        """Store the sequence of each branch that choose() has returned; `sequences` are in its
        order.

        Returns:
            The sequences, with beams of one parent side by side: while a step is built, a beam that
            shares a block that is to be copied is preempted only when no other copy can take that
            block.
        """
        for beam, seq in zip(self._next, sequences, strict=True):
            beam.seq = seq
        self._beam_of = {beam.seq: beam for beam in self._next}
        return [beam.seq for beam in sorted(self._next, key=lambda beam: beam.parent)]

    def events(self, num_cached_tokens: int) -> list[TokenEvent]:
        """Return an event for each token of the continuations that have ended, the best
        continuation first.

        The last event of each continuation has its finish reason.
        """
        found = []
        for index, ended in enumerate(self._ended):
            reason, stop_reason = FinishReason.LENGTH, None
            if ended.is_end_token:
                reason = FinishReason.STOP
                stop_reason = ended.token_id if ended.token_id in self.request.stop_ids else None
            found += [
                TokenEvent(self.request.request_id, index, token, None, None, num_cached_tokens)
                for token in ended.path.tokens()
            ]
            found[-1] = found[-1]._replace(finish_reason=reason, stop_reason=stop_reason)
        return found

    def _path(self, beam: _Beam, token_id: int, logprob: float) -> _Path:
        assert beam.row is not None
        alternatives = beam.row.top_logprobs[: self.params.logprobs or 0]
        return _Path(beam.path, SampledToken(token_id, logprob, alternatives))

    def _is_done(self, length: int) -> bool:
        """Return whether no beam lives, or the live ones cannot change the result."""
        if not self._next:
            return True
        if len(self._ended) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self._max_len - self._num_prompt_tokens
        return self.params.score(self._next[0].score, length) <= self._ended[-1].score


class Beams:
    """The beam searches of a scheduler; it forks and drops their sequences as beams live on or end.

    Args:
        roster: the running and waiting sequences.
        tables: the block tables.

    Attributes:
        searches: the search of each unfinished request that is one, by request_id.
    """

    def __init__(self, roster: Roster, tables: BlockTables) -> None:
        self.roster, self.tables = roster, tables
        self.searches: dict[str, BeamSearch] = {}
        self._unsettled: dict[BeamSearch, None] = {}

    def start(self, first: Sequence) -> None:
        """Begin the search of a request whose first sequence, `first`, has just been added."""
        self.searches[first.request.request_id] = BeamSearch(first.request, first, first.max_len)
        first.is_stepwise = True

    def end(self, request_id: str) -> None:
        """Forget the search of a request that has ended, if it was one."""
        self.searches.pop(request_id, None)

    def search_of(self, seq: Sequence) -> BeamSearch | None:
        """Return the search of a beam; None for other sequences."""
        return self.searches.get(seq.request.request_id)

    def take(self, seq: Sequence, row: SampledToken) -> tuple[list[TokenEvent], list[int]]:
        """Take a beam's log-probabilities; when all beams of its search have theirs, continue the
        best.

        Returns:
            The events of a finished search, whose request the caller must end, else an empty list;
            and the seq_ids of dropped beams that held blocks.
        """
        search = self.searches[seq.request.request_id]
        if not search.take(seq, row):
            self._unsettled[search] = None
            return [], []
        self._unsettled.pop(search, None)
        branches = search.choose()
        if branches:
            return [], self._branch(search, branches)
        return search.events(seq.num_cached_tokens), []

    def settle(self) -> None:
        """After a step's results, move resting beams behind those that have yet to run, in the
        roster.

        It concerns searches that took a row in this step and still lack others.
        """
        for search in self._unsettled:
            request_id = search.request.request_id
            if self.searches.get(request_id) is search:  # it has not failed in this step
                self.roster.regroup(search.order(self.roster.unfinished(request_id)))
        self._unsettled.clear()

    def regroup(self, seq: Sequence) -> None:
        """Order the beams of a request anew after `seq`, one of them, got or lost blocks.

        A sequence that is no beam is left alone.
        """
        search = self.search_of(seq)
        if search is not None:
            family = self.roster.requests[seq.request.request_id]
            self.roster.regroup(search.order(family))

    def is_resting(self, seq: Sequence) -> bool:
        """Return whether a sequence is a beam that waits for the rows of others."""
        search = self.search_of(seq)
        return search is not None and search.is_resting(seq)

    def who_makes_way(self, seq: Sequence, lacks_seat: bool) -> Sequence | None:
        """Return the beam that must make way for a waiting sequence; None if no beam can.

        It is the last resting beam of the same search or of a later one. None also if only blocks
        are missing, not a seat, and some become free when an unfinished step has ended.
        """
        if self.tables.has_fenced and not lacks_seat:
            return None
        for other in reversed(self.roster.running):
            if other.rank[:2] < seq.rank[:2]:
                break
            if self.is_resting(other):
                return other
        return None

    def _branch(self, search: BeamSearch, branches: list[Branch]) -> list[int]:
        """Turn the beams of a search into its branches; return the seq_ids of those dropped with
        blocks.

        A parent continues with its first branch and is forked for further ones; a beam without a
        branch ends.

        Args:
            branches: the parent and the next token of each new beam.
        """
        family = self.roster.unfinished(search.request.request_id)
        parents = {branch.parent for branch in branches}
        kept = {s.index for s in parents}
        free = (i for i in range(len(branches)) if i not in kept)
        gone = [s for s in family if s not in parents]
        held, leaving = [s.seq_id for s in gone if s.block_ids], iter(gone)
        sequences, known = list[Sequence](), {s: s.num_tokens for s in parents}
        for parent, token_id in branches:
            seq = parent
            if parent.num_tokens > known[parent]:  # it continues with another token
                seq = self.roster.branch(parent, parent.token_ids[: known[parent]], next(free))
                seq.is_stepwise = True
                seq.num_cached_tokens = parent.num_cached_tokens
                if parent.block_ids:
                    self.tables.fork(parent, seq, next(leaving, None))
                    self.tables.trace.note("fork", parent.seq_id, seq.seq_id, seq.index)
            seq.token_ids.append(token_id)
            sequences.append(seq)
        self.roster.regroup(search.order(search.follow(sequences)))
        for seq in gone:
            self.tables.trace.finish(seq, False)
            self.tables.release(seq)
        return held
