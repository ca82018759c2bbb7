"""TinyLFU: how often keys were asked for lately, in a few bits each, to keep what is used once off a tier that wears.

A count-min sketch of 4-bit counters (Einziger, Friedman and Manes, 2017): four counters a key, the least of them is its
count. A doorkeeper, a Bloom filter, takes the first use of every key, so that keys seen once, most of them, cost no
counter. After 8 uses a key all counters are halved and the doorkeeper is emptied: what was popular yesterday fades.
Between two such times counts are never too low (up to their limit), and too high for few keys.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import xxhash

from .keys import StoreKey

_ROWS = 4
_MAX_COUNT = 15
_USES_PER_KEY = 8  # before counters are halved
_BITS_PER_KEY = 32  # of the doorkeeper: 15 % of new keys pass when all uses of a period were of different keys
_BITS = 3


class TinyLFU:
    """Recent uses of about `keys` different keys, in 6 bytes a key. May be used by several threads at once."""

    def __init__(self, keys: int) -> None:
        self._width = 1 << max(keys - 1, 63).bit_length()
        self._counters = bytearray(_ROWS * self._width // 2)  # two to a byte
        self._doorkeeper = bytearray(self._width * _BITS_PER_KEY // 8)
        self._period = _USES_PER_KEY * self._width
        self._uses = 0
        self._lock = threading.Lock()

    def record(self, keys: Sequence[StoreKey]) -> None:
        """Count one use of each."""
        with self._lock:
            for key in keys:
                places, bits = self._places(key)
                if self._is_in(bits):
                    self._increment(places)
                else:
                    for bit in bits:
                        self._doorkeeper[bit >> 3] |= 1 << (bit & 7)
                self._uses += 1
                if self._uses >= self._period:
                    self._age()

    def frequency(self, key: StoreKey) -> int:
        """Uses of a key lately, at most 16."""
        with self._lock:
            places, bits = self._places(key)
            return min(map(self._count, places)) + self._is_in(bits)

    def _places(self, key: StoreKey) -> tuple[list[int], list[int]]:
        """A key's counters, one in each row, and its bits of the doorkeeper."""
        digest = xxhash.xxh3_128_intdigest(key)
        first, step = digest >> 64, digest | 1
        counters = [row * self._width + (first + row * step) % self._width for row in range(_ROWS)]
        return counters, [(first + (_ROWS + i) * step) % (self._width * _BITS_PER_KEY) for i in range(_BITS)]

    def _is_in(self, bits: list[int]) -> bool:
        return all(self._doorkeeper[bit >> 3] >> (bit & 7) & 1 for bit in bits)

    def _count(self, place: int) -> int:
        return self._counters[place >> 1] >> (place & 1) * 4 & _MAX_COUNT

    def _increment(self, places: list[int]) -> None:
        counts = [self._count(place) for place in places]
        least = min(counts)
        if least < _MAX_COUNT:
            for place, count in zip(places, counts, strict=True):
                if count == least:  # the others are too high already
                    self._counters[place >> 1] += 1 << (place & 1) * 4

    def _age(self) -> None:
        counters = np.frombuffer(self._counters, np.uint8)
        counters >>= 1
        counters &= 0x77  # without the bit that the upper counter of a byte lost to the lower
        self._doorkeeper = bytearray(len(self._doorkeeper))
        self._uses //= 2
