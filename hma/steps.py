"""Steps in flight: what was reserved and not yet committed, in order, and the checks that a commit matches its step.

Blocks of a row that leaves while a step is in flight may still be written by that step, so they wait here until it is
committed; they are let go in the order in which they came.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import KvtideError
from kvtide.kvcache.specs import Int64Array

# Most drafts of one row in one step; engines allow at most 128.
MAX_DRAFTS = 128


class Step(NamedTuple):
    """One reservation; `generation` tells whether a row still holds the request that it held then.

    `changes` is the queue's count of rows that went. `num_drafts` and `has_gap` are None where there are none.
    """

    number: int
    changes: int
    rows: Int64Array
    generation: Int64Array
    num_tokens: Int64Array
    num_drafts: Int64Array | None
    has_gap: npt.NDArray[np.bool_] | None


class Parting(NamedTuple):
    """Blocks to release, in eviction order, with their eviction classes; `counts[group]` of each group."""

    ids: Int64Array
    classes: npt.NDArray[np.uint8]
    salt: str
    counts: dict[int, int] | None = None


class StepQueue:
    """First reserved, first committed. `running`, `generation` and `in_flight` (tokens) are arrays by row."""

    def __init__(self, max_requests: int, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._steps: deque[Step] = deque()
        self._next_number = 0
        self._waiting: deque[tuple[int, Parting]] = deque()
        # Most steps run the rows of the step before; those need no second look while no row has gone.
        self._changes = 0
        self._checked: tuple[int, Int64Array] = (-1, np.empty(0, dtype=np.int64))
        self.running = np.zeros(max_requests, dtype=np.bool_)
        self.generation = np.zeros(max_requests, dtype=np.int64)
        self.in_flight = np.zeros(max_requests, dtype=np.int64)
        self.drafts_in_flight = np.zeros(max_requests, dtype=np.int64)

    def start(self, row: int) -> None:
        """A row begins to run, as a new request or a resumed one."""
        self.running[row] = True
        self.generation[row] += 1
        self.in_flight[row] = self.drafts_in_flight[row] = 0

    def stop(self, row: int, parting: Parting) -> bool:
        """A row stops running. True when its blocks can be let go at once; else they wait for its last step."""
        busy = self.in_flight[row] > 0
        if busy:
            last = max(step.number for step in self._steps if (step.rows == row).any())
            self._waiting.append((last, parting))
        self._changes += 1
        self.running[row] = False
        self.in_flight[row] = self.drafts_in_flight[row] = 0
        return not busy

    @property
    def is_idle(self) -> bool:
        """Whether no step is in flight."""
        return not self._steps

    def check_reserve(self, rows: Int64Array, tokens: Int64Array, drafts: Int64Array | None, most_tokens: int) -> None:
        """`KvtideError` unless these rows can take a step of these tokens now."""
        if rows.ndim != 1 or tokens.shape != rows.shape or (drafts is not None and drafts.shape != rows.shape):
            shapes = ", ".join(str(part.shape) for part in (rows, tokens, rows if drafts is None else drafts))
            raise KvtideError(f"rows, num_tokens and num_drafts must be equally long, not {shapes}")
        if len(self._steps) >= self._max_in_flight:
            raise KvtideError(f"{len(self._steps)} steps are in flight; commit one first (max_steps_in_flight)")
        if not len(rows):
            return
        changes, checked = self._checked
        if changes != self._changes or len(rows) != len(checked) or np.count_nonzero(rows != checked):
            self._check_rows(rows)
        if tokens.min() < 1 or tokens.max() > most_tokens:
            raise KvtideError(
                f"num_tokens must be from 1 to max_step_tokens {most_tokens}, not {tokens.min()} to {tokens.max()}"
            )
        if drafts is None:
            return
        if drafts.min() < 0 or (drafts >= tokens).any() or drafts.max() > MAX_DRAFTS:
            raise KvtideError(f"num_drafts must be from 0 to num_tokens - 1, and at most {MAX_DRAFTS}")

    def _check_rows(self, rows: Int64Array) -> None:
        if rows.min() < 0 or rows.max() >= len(self.running) or not self.running[rows].all():
            wrong = next(row for row in rows.tolist() if not (0 <= row < len(self.running) and self.running[row]))
            raise KvtideError(f"row {wrong} is not running; admit or resume it first")
        if np.bincount(rows).max() > 1:
            raise KvtideError("a row occurs twice in one step")

    def push(
        self,
        rows: Int64Array,
        tokens: Int64Array,
        drafts: Int64Array | None,
        has_gap: npt.NDArray[np.bool_] | None,
    ) -> int:
        """Append a step; returns its number."""
        number = self._next_number
        self._next_number += 1
        if self._steps:
            self.in_flight[rows] += tokens
        else:
            self.in_flight[rows] = tokens
        if drafts is not None:
            self.drafts_in_flight[rows] += drafts
        self._checked = (self._changes, rows)
        self._steps.append(Step(number, self._changes, rows, self.generation[rows], tokens, drafts, has_gap))
        return number

    def oldest(self, rows: Int64Array, accepted: Int64Array) -> Step:
        """The oldest step cut down to the rows still running; `KvtideError` unless the commit matches it."""
        if not self._steps:
            raise KvtideError("no step is in flight; reserve one first")
        step = self._steps[0]
        if step.changes != self._changes:
            alive = (step.generation == self.generation[step.rows]) & self.running[step.rows]
            parts = (None if part is None else part[alive] for part in step[2:])
            step = Step(step.number, step.changes, *parts)  # type: ignore[arg-type]
        if rows.shape != step.rows.shape or np.count_nonzero(rows != step.rows):
            raise KvtideError(
                f"commit got rows {_some(rows)}; step {step.number} runs rows {_some(step.rows)}, in that order"
            )
        if accepted.shape != rows.shape:
            raise KvtideError(f"num_accepted has shape {accepted.shape}; step {step.number} has {len(rows)} rows")
        # Once tokens have got no slot, no row may fall back behind what was sure to be committed: all but the drafts.
        gap = None if step.has_gap is None else step.has_gap
        for later in self._steps:
            if later.has_gap is not None:
                same = later.generation == self.generation[later.rows]
                behind = np.isin(rows, later.rows[later.has_gap & same])
                gap = behind if gap is None else gap | behind
        if gap is None and not np.count_nonzero((accepted < 0) | (accepted > step.num_tokens)):
            return step
        if gap is None:
            gap = np.zeros(len(rows), dtype=np.bool_)
        sure = step.num_tokens if step.num_drafts is None else step.num_tokens - step.num_drafts
        wrong = (accepted < 0) | (accepted > step.num_tokens) | gap & (accepted < sure)
        if wrong.any():
            at = int(wrong.argmax())
            reason = "; tokens that are no drafts cannot be rejected once some had no slot" if gap[at] else ""
            raise KvtideError(
                f"row {int(rows[at])} commits {int(accepted[at])} tokens of {int(step.num_tokens[at])} reserved{reason}"
            )
        return step

    def retire(self, step: Step) -> list[Parting]:
        """The oldest step is done; returns the blocks that waited for it."""
        self._steps.popleft()
        if self._steps:
            self.in_flight[step.rows] -= step.num_tokens
        else:
            self.in_flight[step.rows] = 0
        if step.num_drafts is not None:
            self.drafts_in_flight[step.rows] -= step.num_drafts
        ready = []
        while self._waiting and self._waiting[0][0] <= step.number:
            ready.append(self._waiting.popleft()[1])
        return ready

    def held(self) -> Int64Array:
        """Ids of the blocks that wait for a step."""
        parts = [parting.ids for _, parting in self._waiting]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def whole_numbers(name: str, values: npt.ArrayLike) -> Int64Array:
    """A copy as int64, since engines reuse their arrays; `KvtideError` for anything but whole numbers."""
    given = np.asarray(values)
    if given.size and given.dtype.kind not in "iu":
        raise KvtideError(f"{name} must be whole numbers, not {given.dtype}")
    return given.astype(np.int64)


def _some(rows: Int64Array) -> str:
    return f"{rows[:8].tolist()}{'' if len(rows) <= 8 else f' and {len(rows) - 8} more'}"
