"""What is known of every row's tokens: its chain of keys, its last partial block, and what is cached already.

Tokens become known at admission (the prompt) and at commit (what was generated). Their keys are ready as soon as a base
block is whole; blocks are put under them (`register`) only once the tokens are committed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache.specs import Int64Array

from .hashing import Item, KeyChain
from .tables import ranges


class FreshKeys(NamedTuple):
    """Base blocks that have become whole: row, number of the block in its row, and key of each."""

    rows: Int64Array
    numbers: Int64Array
    keys: list[bytes]


class Sequences:
    """Arrays by row. `base` is the tokens per key; `keep_tokens` keeps all token ids, for events."""

    def __init__(self, max_requests: int, base: int, *, keep_tokens: bool) -> None:
        self._base = base
        self._chains: list[KeyChain | None] = [None] * max_requests
        self._tokens: list[bytearray] | None = [bytearray() for _ in range(max_requests)] if keep_tokens else None
        self._tail = np.zeros((max_requests, base), dtype="<i4")
        self.known = np.zeros(max_requests, dtype=np.int64)
        self.prompt = np.zeros(max_requests, dtype=np.int64)
        self.registered = np.zeros(max_requests, dtype=np.int64)

    def start(self, row: int, space: bytes, tokens: bytes, items: list[Item], *, hashed: bool) -> None:
        """A prompt comes: int32 `tokens`, and its items sorted by position. It has keys only if `hashed`."""
        self._chains[row] = KeyChain(self._base, space, tokens if hashed else b"", items)
        count = len(tokens) // 4
        rest = count % self._base
        self._tail[row, :rest] = np.frombuffer(tokens[len(tokens) - 4 * rest :], dtype="<i4")
        self.known[row] = self.prompt[row] = count
        if self._tokens is not None:
            self._tokens[row] = bytearray(tokens)

    def end(self, row: int) -> None:
        """The request has gone."""
        self._chains[row] = None
        if self._tokens is not None:
            self._tokens[row] = bytearray()

    def chain(self, row: int) -> KeyChain:
        """The row's keys."""
        chain = self._chains[row]
        assert chain is not None
        return chain

    def token_ids(self, row: int, number: int) -> tuple[int, ...]:
        """Token ids of one base block; needs `keep_tokens`."""
        assert self._tokens is not None
        size = 4 * self._base
        return tuple(np.frombuffer(self._tokens[row][number * size : (number + 1) * size], dtype="<i4").tolist())

    def unseen(self, rows: Int64Array, upto: Int64Array) -> Int64Array:
        """How many tokens of each row are not known, of its first `upto[i]`."""
        count: Int64Array = np.maximum(upto - self.known[rows], 0)
        return count

    def learn(self, rows: Int64Array, counts: Int64Array, ids: npt.NDArray[np.int32]) -> None:
        """Append `counts[i]` tokens to each row; `ids` holds them row by row."""
        known = self.known[rows]
        filled = known % self._base
        if len(ids) == len(rows) and counts.min() == 1:
            owners, places = np.arange(len(rows)), filled  # one token each, as in most decode steps
        else:
            owners = np.repeat(np.arange(len(rows)), counts)
            places = filled[owners] + ranges(counts)
        inside = places < self._base
        self._tail[rows[owners[inside]], places[inside]] = ids[inside]
        self.known[rows] = known + counts

        end = filled + counts
        whole = rows[end >= self._base]
        blocks = self._tail[whole].tobytes()
        size = 4 * self._base
        start = 0
        chains = self._chains
        for row in whole.tolist():
            chains[row].add_block(blocks[start : start + size])
            start += size
        if end.max() <= self._base and self._tokens is None:
            return
        ends = np.cumsum(counts)
        for i in np.flatnonzero(end > self._base).tolist():
            row = int(rows[i])
            more = ids[ends[i] - counts[i] + self._base - filled[i] : ends[i]]
            self.chain(row).extend(more.tobytes())
            rest = len(more) % self._base
            self._tail[row, :rest] = more[len(more) - rest :]
        if self._tokens is not None:
            for i, row in enumerate(rows.tolist()):
                self._tokens[row] += ids[ends[i] - counts[i] : ends[i]].tobytes()

    def register(self, rows: Int64Array, committed: Int64Array) -> FreshKeys | None:
        """The base blocks that `committed[i]` tokens have made whole since the last call; None when there are none."""
        whole = committed // self._base
        fresh = np.flatnonzero(whole > self.registered[rows])
        if not len(fresh):
            return None
        rows, whole = rows[fresh], whole[fresh]
        before = self.registered[rows]
        self.registered[rows] = whole
        keys: list[bytes] = []
        chains = self._chains
        for row, begin, end in zip(rows.tolist(), before.tolist(), whole.tolist(), strict=True):
            keys += chains[row].between(begin, end)
        if len(keys) == len(rows):
            return FreshKeys(rows, before, keys)
        counts = whole - before
        return FreshKeys(np.repeat(rows, counts), np.repeat(before, counts) + ranges(counts), keys)
