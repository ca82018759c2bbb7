"""One request inside the scheduler, and one step as the scheduler decided it. Plain state; `scheduler.py` moves it.

Counters are vLLM's. With one step in flight (`o` sampled tokens not seen yet, `d` drafts):

    prompt ... output | o d d d            tokens known | placeholders
    <---------- computed --------->        counted as soon as they are scheduled, rolled back for rejected drafts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvtide.kvcache import ConfigError
from kvtide.kvcache.specs import Int64Array


@dataclass(eq=False, slots=True)
class Job:
    """A request to serve. `output` are the tokens that the model will sample; their number is its `max_tokens`.

    `priority` lower is served first (under the priority policy). What follows `arrival_s` in a comparison is the id, as
    in vLLM. `image_tokens` are kept by cross-attention layers; `turn_ends` are lengths at which other prompts may part
    from this one. `eligible` is the scheduler's call from which on it may decode again. While `is_loading` the job
    waits for its KV to come from a lower tier; once `is_loaded` it keeps its blocks until it runs. `device_hit` of its
    tokens were on the device when it was last brought in. `place` is its number among all admissions. `num_prompt` are
    the prompt's tokens, `longest` those of the sequence at its end.
    """

    request_id: str
    prompt: Int64Array
    output: Int64Array
    arrival_s: float = 0.0
    priority: int = 0
    image_tokens: int = 0
    turn_ends: tuple[int, ...] = ()
    num_output: int = field(default=0, init=False)
    computed: int = field(default=0, init=False)
    placeholders: int = field(default=0, init=False)
    drafts: int = field(default=0, init=False)
    in_flight: int = field(default=0, init=False)
    is_prefill_chunk: bool = field(default=False, init=False)
    preemptions: int = field(default=0, init=False)
    row: int | None = field(default=None, init=False)
    finished: bool = field(default=False, init=False)
    eligible: int = field(default=0, init=False)
    is_loading: bool = field(default=False, init=False)
    is_loaded: bool = field(default=False, init=False)
    device_hit: int = field(default=0, init=False)
    place: int = field(default=0, init=False)
    # Asked for in every step.
    num_prompt: int = field(init=False)
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        if not len(self.prompt) or not len(self.output):
            raise ConfigError(f"request {self.request_id!r} needs a prompt and an output of at least one token each")
        self.num_prompt = len(self.prompt)
        self.longest = self.num_prompt + len(self.output)

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and sampled output."""
        return self.num_prompt + self.num_output

    @property
    def rank(self) -> tuple[int, float, str]:
        """Order under the priority policy, first to last."""
        return self.priority, self.arrival_s, self.request_id

    @property
    def will_end_in_flight(self) -> bool:
        """Whether steps in flight are sure to reach the last output token, even if all their drafts are rejected."""
        placeholders = self.placeholders
        return placeholders > 0 and self.computed + 2 - placeholders >= self.longest

    def known_tokens(self) -> Int64Array:
        """Ids of the tokens known."""
        return np.concatenate([self.prompt, self.output[: self.num_output]])

    def tokens_between(self, begin: int, end: int) -> Int64Array:
        """Ids of the output tokens at positions `begin` (at least the prompt's length) to `end` of the sequence."""
        return self.output[begin - self.num_prompt : end - self.num_prompt]


class Scheduled(NamedTuple):
    """A job's part of a step: `num_tokens` computed from position `start` on, the last `num_drafts` of them drafts.

    `samples` says whether the step ends at the last token known, so that a token is sampled; `hit` is the tokens found
    when the step admits the job, else None; `loaded` of them came from lower tiers. `is_padding` marks drafts that only
    fill the step up to the width of a decode step; none of them can be accepted.
    """

    job: Job
    row: int
    start: int
    num_tokens: int
    num_drafts: int
    samples: bool
    hit: int | None = None
    is_padding: bool = False
    loaded: int = 0


class Columns(NamedTuple):
    """The requests of a step as int64 arrays: row, position of the first token, and number of tokens of each."""

    rows: Int64Array
    starts: Int64Array
    counts: Int64Array


class Decodes(NamedTuple):
    """Jobs that all compute one token in a step and sample the next: `tokens[i]` at position `starts[i]` of a job."""

    jobs: tuple[Job, ...]
    rows: Int64Array
    starts: Int64Array
    tokens: Int64Array


def columns_of(rows: Int64Array, starts: Int64Array, parts: Sequence[Scheduled]) -> Columns:
    """First requests that compute one token, then parts."""
    num = len(rows)
    if not parts:
        return Columns(rows, starts, np.ones(num, dtype=np.int64))
    columns = np.empty((3, num + len(parts)), dtype=np.int64)
    columns[0, :num], columns[1, :num], columns[2, :num] = rows, starts, 1
    columns[:, num:] = np.array([part[1:4] for part in parts], dtype=np.int64).T
    return Columns(*columns)


class Step:
    """One step: first `decodes`, then `singles` in the order of scheduling; `preempted` lost their work for it.

    `num_tokens` are all tokens that the step computes, drafts included, `num_samples` those at which it samples.
    `columns` are of all requests.
    """

    __slots__ = ("columns", "decodes", "num_requests", "num_samples", "num_tokens", "preempted", "singles")

    def __init__(
        self,
        singles: Sequence[Scheduled],
        preempted: Sequence[Job],
        decodes: Decodes | None = None,
        columns: Columns | None = None,
    ) -> None:
        self.singles = tuple(singles)
        self.preempted = tuple(preempted)
        self.decodes = decodes
        num = 0 if decodes is None else len(decodes.jobs)
        self.num_requests = num + len(singles)
        self.num_tokens = num + sum([part.num_tokens for part in singles])
        self.num_samples = num + sum([1 + part.num_drafts for part in singles if part.samples])
        if columns is None:
            none = np.empty(0, dtype=np.int64)
            head = (none, none) if decodes is None else (decodes.rows, decodes.starts)
            columns = columns_of(*head, singles)
        self.columns = columns

    @property
    def parts(self) -> tuple[Scheduled, ...]:
        """Every request's part, in the order of scheduling."""
        if self.decodes is None:
            return self.singles
        jobs, rows, starts, _ = self.decodes
        decodes = zip(jobs, rows.tolist(), starts.tolist(), strict=True)
        return (*(Scheduled(job, row, start, 1, 0, True) for job, row, start in decodes), *self.singles)
