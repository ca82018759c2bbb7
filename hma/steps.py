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
    """One reservation; `generation` tells whether a row still holds the request that it held then."""

    number: int
    rows: Int64Array
    generation: Int64Array
    num_tokens: Int64Array
    num_drafts: Int64Array
    has_gap: npt.NDArray[np.bool_]


class Parting(NamedTuple):
    """Blocks to release, in eviction order, with their eviction classes."""

    ids: Int64Array
    classes: npt.NDArray[np.uint8]
    salt: str


class StepQueue:
    """First reserved, first committed. `running`, `generation` and `in_flight` (tokens) are arrays by row."""

    def __init__(self, max_requests: int, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._steps: deque[Step] = deque()
        self._next_number = 0
        self._waiting: deque[tuple[int, Parting]] = deque()
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
        self.running[row] = False
        self.in_flight[row] = self.drafts_in_flight[row] = 0
        return not busy

    def check_reserve(self, rows: Int64Array, tokens: Int64Array, drafts: Int64Array, most_tokens: int) -> None:
        """`KvtideError` unless these rows can take a step of these tokens now."""
        if rows.ndim != 1 or tokens.shape != rows.shape or drafts.shape != rows.shape:
            raise KvtideError(
                "rows, num_tokens and num_drafts must be equally long, not "
                f"{rows.shape}, {tokens.shape}, {drafts.shape}"
            )
        if len(self._steps) >= self._max_in_flight:
            raise KvtideError(f"{len(self._steps)} steps are in flight; commit one first (max_steps_in_flight)")
        if not len(rows):
            return
        if rows.min() < 0 or rows.max() >= len(self.running) or not self.running[rows].all():
            wrong = next(row for row in rows.tolist() if not (0 <= row < len(self.running) and self.running[row]))
            raise KvtideError(f"row {wrong} is not running; admit or resume it first")
        if np.bincount(rows).max() > 1:
            raise KvtideError("a row occurs twice in one step")
        if tokens.min() < 1 or tokens.max() > most_tokens:
            raise KvtideError(
                f"num_tokens must be from 1 to max_step_tokens {most_tokens}, not {tokens.min()} to {tokens.max()}"
            )
        if drafts.min() < 0 or (drafts >= tokens).any() or drafts.max() > MAX_DRAFTS:
            raise KvtideError(f"num_drafts must be from 0 to num_tokens - 1, and at most {MAX_DRAFTS}")

    def push(self, rows: Int64Array, tokens: Int64Array, drafts: Int64Array, has_gap: npt.NDArray[np.bool_]) -> int:
        """Append a step; returns its number."""
        number = self._next_number
        self._next_number += 1
        self._steps.append(Step(number, rows, self.generation[rows], tokens, drafts, has_gap))
        self.in_flight[rows] += tokens
        self.drafts_in_flight[rows] += drafts
        return number

    def oldest(self, rows: Int64Array, accepted: Int64Array) -> Step:
        """The oldest step cut down to the rows still running; `KvtideError` unless the commit matches it."""
        if not self._steps:
            raise KvtideError("no step is in flight; reserve one first")
        step = self._steps[0]
        alive = (step.generation == self.generation[step.rows]) & self.running[step.rows]
        if not alive.all():
            step = Step(step.number, *(part[alive] for part in step[1:]))
        if not np.array_equal(rows, step.rows):
            raise KvtideError(
                f"commit got rows {_some(rows)}; step {step.number} runs rows {_some(step.rows)}, in that order"
            )
        if accepted.shape != rows.shape:
            raise KvtideError(f"num_accepted has shape {accepted.shape}; step {step.number} has {len(rows)} rows")
        # Once tokens have got no slot, no row may fall back behind what was sure to be committed: all but the drafts.
        gap = step.has_gap
        for later in self._steps:
            if later.has_gap.any():
                gap = gap | np.isin(rows, later.rows[later.has_gap & (later.generation == self.generation[later.rows])])
        wrong = (accepted < 0) | (accepted > step.num_tokens) | gap & (accepted < step.num_tokens - step.num_drafts)
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
        self.in_flight[step.rows] -= step.num_tokens
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
