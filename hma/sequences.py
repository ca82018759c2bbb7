"""What is known of every row's tokens: its chain of keys, the tokens not hashed yet, and what is cached already.

Tokens become known at admission (the prompt) and at commit (what was generated). What was generated is hashed many
blocks at a time, at the latest when somebody asks for the row's keys; blocks are put under keys (`fresh`) only once
their tokens are committed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import KvtideError
from kvtide.kvcache.specs import Int64Array

from .hashing import Item, KeyChain
from .tables import ranges

# Generated tokens of a row that wait to be hashed together, at most; a whole number of blocks of them.
HASH_AHEAD = 512


class FreshKeys(NamedTuple):
    """Base blocks that are whole and not cached yet: row, number of the block in its row, and key of each."""

    rows: Int64Array
    numbers: Int64Array
    keys: list[bytes]


class Sequences:
    """Arrays by row. `base` is the tokens per key; `keep_tokens` keeps all token ids, for events.

    `registered` counts the base blocks that were offered to the cache.
    """

    def __init__(self, max_requests: int, base: int, *, keep_tokens: bool) -> None:
        self._base = base
        self._chains: list[KeyChain | None] = [None] * max_requests
        self._tokens: list[bytearray] | None = [bytearray() for _ in range(max_requests)] if keep_tokens else None
        # The tokens from `_hashed[row]`, a whole number of blocks, on.
        self._room = max(HASH_AHEAD // base, 1) * base
        self._tail = np.empty((max_requests, self._room), dtype="<i4")
        self._hashed = np.zeros(max_requests, dtype=np.int64)
        self.known = np.zeros(max_requests, dtype=np.int64)
        self.prompt = np.zeros(max_requests, dtype=np.int64)
        self.registered = np.zeros(max_requests, dtype=np.int64)

    def start(self, row: int, space: bytes, tokens: bytes, items: list[Item], *, hashed: bool) -> None:
        """A prompt comes: int32 `tokens`, and its items sorted by position. It has keys only if `hashed`."""
        self._chains[row] = KeyChain(self._base, space, tokens if hashed else b"", items)
        count = len(tokens) // 4
        rest = count % self._base
        self._tail[row, :rest] = np.frombuffer(tokens, dtype="<i4", offset=len(tokens) - 4 * rest)
        self._hashed[row] = count - rest
        self.known[row] = self.prompt[row] = count
        if self._tokens is not None:
            self._tokens[row] = bytearray(tokens)

    def end(self, row: int) -> None:
        """The request has gone."""
        self._chains[row] = None
        if self._tokens is not None:
            self._tokens[row] = bytearray()

    def chain(self, row: int) -> KeyChain:
        """The row's keys, of all its whole blocks."""
        waiting = int(self.known[row] - self._hashed[row])
        if waiting >= self._base:
            self._hash(row, self._tail[row, :waiting].copy())
        chain = self._chains[row]
        assert chain is not None
        return chain

    def _hash(self, row: int, tokens: npt.NDArray[np.int32]) -> None:
        """Hash the whole blocks of the tokens from `_hashed[row]` on, and keep the rest."""
        rest = len(tokens) % self._base
        whole = len(tokens) - rest
        chain = self._chains[row]
        assert chain is not None
        chain.extend(tokens[:whole].tobytes())
        self._hashed[row] += whole
        self._tail[row, :rest] = tokens[whole:]

    def token_ids(self, row: int, number: int) -> tuple[int, ...]:
        """Token ids of one base block; needs `keep_tokens`."""
        assert self._tokens is not None
        size = 4 * self._base
        return tuple(np.frombuffer(self._tokens[row][number * size : (number + 1) * size], dtype="<i4").tolist())

    def learn(self, rows: Int64Array, committed: Int64Array, ids: npt.NDArray[np.int32]) -> None:
        """Rows have `committed[i]` tokens; `ids` holds those of them that were not known, row by row.

        `KvtideError` when it holds more or fewer; then nothing has changed.
        """
        known = self.known[rows]
        counts = committed - known
        grows = counts > 0
        if self._tokens is None and np.count_nonzero(grows) == len(ids) and counts.max(initial=0) <= 1:
            # One token each, as in most decode steps, or none, as the rows with prompts beside them.
            if len(ids) < len(rows):
                rows, known, committed = rows[grows], known[grows], committed[grows]
            places = known - self._hashed[rows]
            self.known[rows] = committed
            self._tail[rows, places] = ids
            full = places == self._room - 1
            if np.count_nonzero(full):
                for row in rows[full].tolist():
                    self._hash(row, self._tail[row].copy())
            return
        counts = np.maximum(counts, 0)
        if len(ids) != counts.sum():
            raise KvtideError(f"token_ids has {len(ids)} tokens; {int(counts.sum())} of the rows' were not seen before")
        if not len(ids):
            return
        places = known - self._hashed[rows]
        self.known[rows] = known + counts
        stops = np.cumsum(counts)
        fits = places + counts < self._room
        for i in np.flatnonzero(~fits).tolist():
            row, new = int(rows[i]), ids[stops[i] - counts[i] : stops[i]]
            self._hash(row, np.concatenate([self._tail[row, : places[i]], new]))
        fitting = np.repeat(fits, counts)
        owners = np.repeat(rows, counts)[fitting]
        self._tail[owners, (np.repeat(places, counts) + ranges(counts))[fitting]] = ids[fitting]
        if self._tokens is not None:
            for i, row in enumerate(rows.tolist()):
                self._tokens[row] += ids[stops[i] - counts[i] : stops[i]].tobytes()

    def fresh(self, rows: Int64Array, whole: Int64Array) -> FreshKeys:
        """The base blocks before number `whole[i]` that have not been offered to the cache; now they count as such."""
        before = self.registered[rows]
        self.registered[rows] = whole
        keys: list[bytes] = []
        for row, begin, end in zip(rows.tolist(), before.tolist(), whole.tolist(), strict=True):
            keys += self.chain(row).between(begin, end)
        if len(keys) == len(rows):
            return FreshKeys(rows, before, keys)
        counts = whole - before
        return FreshKeys(rows.repeat(counts), before.repeat(counts) + ranges(counts), keys)
