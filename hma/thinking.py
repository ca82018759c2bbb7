"""Reasoning budgets: which positions of a step must be forced to the end of reasoning, and what may be committed.

The engine calls `admit` once per request with the whole sequence, then per step for the whole batch: `force` before
sampling, `commit` with the tokens that were kept. This file owns where each row's markers are; it never sees logits.
It promises the same tokens with and without drafts: a section of reasoning gets exactly its budget, then END.

A request's sequence is its prompt and its output; a resumed request is admitted with both, and goes on where it was.

    ... START  r r r r r r  END[0] END[1] ... END[-1]  answer ...
               |<-budget->|

- A section is open iff the last start marker begins after the last natural end marker. Tokens behind the start marker
  count, those of the prompt too; the marker and END do not. A later start marker begins a section with a fresh budget.
- An open section with count >= budget is forced: the next token is END[k], where k is the length of the longest suffix
  of the sequence that is a proper prefix of END. So END comes one token at a time, over any number of steps, and what
  stands there already is not written twice.
- Only an open section is forced: a natural end written before the budget cancels it, and what END has behind its first
  natural end is never forced.
- Draft j is judged as if drafts 0..j-1 were accepted, and committed tokens alone move the state: a rejected draft
  counts for nothing, and if a draft is rejected before the budget is spent nothing was forced.

The rules are those of vLLM 0.33 (`vllm/v1/worker/gpu/sample/thinking_budget.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from kvtide.kvcache import ConfigError
from kvtide.kvcache.specs import Int64Array

Int32Array = npt.NDArray[np.int32]

UNLIMITED = -1

# One record per request row. `in_...` is how many tokens of a marker the sequence ends with (its whole length when the
# last token completed it), so that a step reads its own tokens and nothing before them.
_PLACE = np.dtype(
    [
        ("length", np.int64),  # tokens in the sequence
        ("start", np.int64),  # index of the last start marker's first token, or -1
        ("natural_end", np.int64),  # the same for the natural end
        ("in_start", np.int64),
        ("in_natural_end", np.int64),
        ("in_forced_end", np.int64),
    ]
)
_Places = npt.NDArray[np.void]  # of _PLACE


@dataclass(frozen=True)
class ThinkingMarkers:
    """Token ids of the reasoning markers; each may be several tokens.

    `natural_end` is what closes a section; `forced_end` is END, the phrase that a spent budget forces, and closes the
    section by containing the natural end. `ConfigError` for markers with which no section opens or none is ended.
    """

    start: tuple[int, ...]
    natural_end: tuple[int, ...]
    forced_end: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in fields(self):
            marker = getattr(self, field.name)
            if not marker or any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in marker):
                raise ConfigError(f"{field.name} is {marker!r}, and must be one or more token ids")
            object.__setattr__(self, field.name, tuple(marker))
        if _last_index(self.start, self.natural_end) >= 0:
            raise ConfigError(
                f"start {self.start} contains natural_end {self.natural_end}, so no section would ever be open"
            )
        closed = (n for n in range(len(self.forced_end) + 1) if _last_index(self.forced_end[:n], self.natural_end) >= 0)
        forced = self.forced_end[: next(closed, 0)]
        if not forced:
            raise ConfigError(
                f"forced_end {self.forced_end} does not contain natural_end {self.natural_end}, "
                "so it would not close the section"
            )
        if _last_index(forced, self.start) >= 0:
            raise ConfigError(
                f"forced_end {self.forced_end} contains start {self.start} before it closes the section, "
                "so it would begin a section with a fresh budget"
            )


class Forcing(NamedTuple):
    """One step's answer. A row with d drafts has positions 0..d; position d is the bonus token."""

    tokens: Int32Array  # [rows, K + 1]: token that position j must be if the drafts before it are accepted, or -1
    limit: Int64Array  # [rows]: the most tokens that can be committed; drafts[limit - 1 :] cannot be accepted

    def cut(self, token_ids: npt.ArrayLike, counts: npt.ArrayLike) -> tuple[Int64Array, Int64Array]:
        """What may be committed of a step that was sampled without forcing.

        `token_ids` [rows, K + 1] holds accepted drafts and then the sampled token, `counts` [rows] how many of them are
        real. The first token that is not the forced one becomes it, and nothing behind it stays. Returns new arrays of
        the same shapes; `ConfigError` for other shapes, types or counts.
        """
        kept = _integers("token_ids", token_ids, ndim=2)
        num = _counts(counts, *self.tokens.shape)
        if kept.shape != self.tokens.shape:
            raise ConfigError(f"token_ids has shape {kept.shape}, and must have {self.tokens.shape}")
        wrong = (self.tokens >= 0) & (kept != self.tokens) & (np.arange(kept.shape[1]) < num[:, None])
        rows = np.flatnonzero(wrong.any(axis=1))
        first = wrong[rows].argmax(axis=1)
        kept[rows, first] = self.tokens[rows, first]
        num[rows] = first + 1
        return kept, num


class ThinkingBudget:
    """Budgets of up to `max_requests` rows. A row that is not admitted, or has no budget, is never forced."""

    def __init__(self, markers: ThinkingMarkers, max_requests: int) -> None:
        if isinstance(max_requests, bool) or not isinstance(max_requests, int) or max_requests < 1:
            raise ConfigError(f"max_requests is {max_requests!r}, and must be an integer of at least 1")
        self.markers = markers
        self._alphabet = np.unique(np.array([*markers.start, *markers.natural_end, *markers.forced_end], np.int64))
        self._in_start, _ = self._automaton(markers.start)
        self._in_natural_end, _ = self._automaton(markers.natural_end)
        self._in_forced_end, border = self._automaton(markers.forced_end)
        # [tokens of END that the sequence ends with] -> the token to force.
        self._next_forced = np.array([*markers.forced_end, markers.forced_end[border]], dtype=np.int32)
        self._budget = np.full(max_requests, UNLIMITED, dtype=np.int64)
        self._places = np.zeros(max_requests, dtype=_PLACE)

    # ---- rows ----

    def admit(self, row: int, token_ids: npt.ArrayLike, budget: int | np.integer[Any] | None) -> None:
        """Begin a request in `row`: its whole sequence [tokens] so far, and reasoning tokens per section.

        `budget` is an integer >= 0; None or -1 is unlimited. `ConfigError` for anything else; the row stays as it was.
        """
        (index,) = self._rows([row])
        tokens = _integers("token_ids", token_ids, ndim=1)
        limit = _budget(budget)
        if limit != UNLIMITED:
            # No match that is still in progress begins before the tail: from there only whole markers matter.
            reach = max(len(self.markers.start), len(self.markers.natural_end), len(self.markers.forced_end))
            tail = tokens[max(0, len(tokens) - reach) :]
            place = np.zeros(1, dtype=_PLACE)
            place["length"] = len(tokens) - len(tail)
            place["start"] = _last_index(tokens, self.markers.start)
            place["natural_end"] = _last_index(tokens, self.markers.natural_end)
            for symbol in self._symbols(tail):
                self._advance(place, symbol)
            self._places[index] = place[0]
        self._budget[index] = limit

    def release(self, row: int) -> None:
        """End the request in `row`."""
        self._budget[self._rows([row])] = UNLIMITED

    def spent(self, rows: npt.ArrayLike) -> Int64Array:
        """Tokens of the budget that the open section has used, [rows]; 0 without an open section or a budget."""
        index = self._rows(rows)
        places, budget = self._places[index], self._budget[index]
        spent: Int64Array = np.where(_is_open(places) & (budget >= 0), np.minimum(self._count(places), budget), 0)
        return spent

    # ---- one step ----

    def force(self, rows: npt.ArrayLike, drafts: npt.ArrayLike) -> Forcing:
        """The tokens that must be forced in this step; changes nothing.

        `rows` [rows] are distinct request rows, `drafts` [rows, K] their draft tokens, shorter runs filled up with -1;
        K = 0 is a step without drafts. `ConfigError` for rows out of range or given twice, other shapes or types.
        """
        index = self._rows(rows)
        ids = _integers("drafts", drafts, ndim=2)
        if len(ids) != len(index):
            raise ConfigError(f"drafts has {len(ids)} rows, and must have {len(index)}, one per request row")
        num_rows, most = ids.shape
        num_drafts = np.logical_and.accumulate(ids >= 0, axis=1).sum(axis=1)
        tokens = np.full((num_rows, most + 1), -1, dtype=np.int32)

        near = self._near(index, ids, num_drafts)
        if near.size:
            places, budget = self._places[index[near]], self._budget[index[near]]
            symbols = self._symbols(ids[near])
            for j in range(most + 1):
                if j:
                    self._advance(places, symbols[:, j - 1])
                spent = _is_open(places) & (self._count(places) >= budget)
                tokens[near, j] = np.where(spent, self._next_forced[places["in_forced_end"]], -1)
            tokens[np.arange(most + 1) > num_drafts[:, None]] = -1

        # A step ends at the bonus token, or at a forced token that the draft there is not.
        last = np.zeros(tokens.shape, dtype=np.bool_)
        last[:, :most] = (tokens[:, :most] >= 0) & (tokens[:, :most] != ids)
        last[np.arange(num_rows), num_drafts] = True
        return Forcing(tokens, last.argmax(axis=1) + 1)

    def commit(self, rows: npt.ArrayLike, token_ids: npt.ArrayLike, counts: npt.ArrayLike) -> None:
        """Append to the sequences the first `counts` [rows] tokens of each row of `token_ids` [rows, M].

        Only what was kept: accepted drafts and the sampled token. `ConfigError` for rows out of range or given twice,
        other shapes or types, counts outside 0..M, or a negative token that counts; nothing is changed then.
        """
        index = self._rows(rows)
        ids = _integers("token_ids", token_ids, ndim=2)
        if len(ids) != len(index):
            raise ConfigError(f"token_ids has {len(ids)} rows, and must have {len(index)}, one per request row")
        num = _counts(counts, *ids.shape)
        for row, j in np.argwhere((ids < 0) & (np.arange(ids.shape[1]) < num[:, None]))[:1]:
            raise ConfigError(f"token {j} of row {index[row]} is {ids[row, j]}, and must be a token id, not a filler")
        limited = np.flatnonzero(self._budget[index] >= 0)
        symbols = self._symbols(ids[limited])
        index, num = index[limited], num[limited]
        for j in range(int(num.max(initial=0))):
            live = num > j
            places = self._places[index[live]]
            self._advance(places, symbols[live, j])
            self._places[index[live]] = places

    # ---- inside ----

    def _rows(self, rows: npt.ArrayLike) -> Int64Array:
        index = _integers("rows", rows, ndim=1)
        for row in index[(index < 0) | (index >= len(self._budget))][:1]:
            raise ConfigError(f"row {row} is not a request row; allowed: 0 to {len(self._budget) - 1}")
        if index.size and (seen := np.bincount(index)).max() > 1:
            raise ConfigError(f"row {seen.argmax()} is given twice, and the rows of a step must be distinct")
        return index

    def _near(self, index: Int64Array, drafts: Int64Array, num_drafts: Int64Array) -> Int64Array:
        """Positions in `index` that this step may force: the rest costs no more than this test.

        An open section must be able to spend its budget within the drafts; a closed one must be opened by them.
        """
        limited = np.flatnonzero(self._budget[index] >= 0)
        places, budget = self._places[index[limited]], self._budget[index[limited]]
        spends = _is_open(places) & (self._count(places) + num_drafts[limited] >= budget)
        opens = (drafts[limited] == self.markers.start[-1]).any(axis=1)
        near: Int64Array = limited[spends | opens]
        return near

    def _count(self, places: _Places) -> Int64Array:
        """Tokens behind the last start marker."""
        count: Int64Array = places["length"] - places["start"] - len(self.markers.start)
        return count

    def _advance(self, places: _Places, symbols: Int64Array) -> None:
        """Append one token to each place, in place."""
        places["length"] += 1
        for name, marker, table in (
            ("start", self.markers.start, self._in_start),
            ("natural_end", self.markers.natural_end, self._in_natural_end),
        ):
            matched = table[places[f"in_{name}"], symbols]
            places[f"in_{name}"] = matched
            np.copyto(places[name], places["length"] - len(marker), where=matched == len(marker))
        places["in_forced_end"] = self._in_forced_end[places["in_forced_end"], symbols]

    def _symbols(self, tokens: Int64Array) -> Int64Array:
        """Place of each token in the alphabet, counted from 1; 0 for the many tokens that are in no marker."""
        nearest = np.minimum(np.searchsorted(self._alphabet, tokens), len(self._alphabet) - 1)
        return np.where(self._alphabet[nearest] == tokens, nearest + 1, 0)

    def _automaton(self, marker: tuple[int, ...]) -> tuple[Int64Array, int]:
        """The Knuth-Morris-Pratt automaton of a marker, and the length of its longest proper border.

        Table [tokens matched, symbol] -> tokens matched; a state is the longest prefix that the sequence ends with.
        """
        symbols = self._symbols(np.array(marker, dtype=np.int64))
        table = np.zeros((len(marker) + 1, len(self._alphabet) + 1), dtype=np.int64)
        table[0, symbols[0]] = 1
        border = 0
        for matched in range(1, len(marker) + 1):
            table[matched] = table[border]
            if matched < len(marker):
                table[matched, symbols[matched]] = matched + 1
                border = int(table[border, symbols[matched]])
        return table, border


def _is_open(places: _Places) -> npt.NDArray[np.bool_]:
    is_open: npt.NDArray[np.bool_] = places["start"] > places["natural_end"]
    return is_open


def _last_index(tokens: Sequence[int] | Int64Array, marker: tuple[int, ...]) -> int:
    """Where the last occurrence of the marker begins, or -1."""
    if len(tokens) < len(marker):
        return -1
    found = np.flatnonzero((sliding_window_view(np.asarray(tokens), len(marker)) == marker).all(axis=1))
    return int(found[-1]) if found.size else -1


def _budget(budget: int | np.integer[Any] | None) -> int:
    if budget is None:
        return UNLIMITED
    if isinstance(budget, bool) or not isinstance(budget, int | np.integer) or budget < UNLIMITED:
        raise ConfigError(f"thinking budget is {budget!r}, and must be an integer >= 0, or -1 or None for no limit")
    return min(int(budget), np.iinfo(np.int64).max)


def _counts(counts: npt.ArrayLike, num_rows: int, most: int) -> Int64Array:
    num = _integers("counts", counts, ndim=1)
    if len(num) != num_rows:
        raise ConfigError(f"counts has {len(num)} rows, and must have {num_rows}, one per request row")
    for wrong in num[(num < 0) | (num > most)][:1]:
        raise ConfigError(f"a count is {wrong}, and must be between 0 and {most}, the width of token_ids")
    return num


def _integers(name: str, values: npt.ArrayLike, ndim: int) -> Int64Array:
    """A copy as int64."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise ConfigError(f"{name} has rows of different lengths, and must be one array of integers") from None
    # An empty list has no integer type of its own.
    if array.ndim != ndim or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(f"{name} is an array of {array.dtype} with {array.ndim} axes, and must be {ndim} of integers")
    return array.astype(np.int64)
