"""The host tier beside memcpy: the same values copied into one buffer, and out of it again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice

import numpy as np
import numpy.typing as npt
from offload_stores import BATCH, KIB, MIB, Contestant, Run
from report import Figure, Target, alternate, scaled

from kvtide.connectors.host import HostConfig, HostConnector

Bytes = npt.NDArray[np.uint8]


class Memcpy:
    """Copies without header, index or checksum, on one thread."""

    def __init__(self, size: int, count: int) -> None:
        rng = np.random.default_rng(0)
        blocks = [rng.integers(0, 256, size, dtype=np.uint8) for _ in range(min(count, 64 * MIB // size))]
        self._values: Sequence[Bytes] = list(islice(cycle(blocks), count))
        self._buffers: Sequence[Bytes] = list(islice(cycle([block.copy() for block in blocks]), count))
        self._memory = np.zeros(size * count, dtype=np.uint8)
        self._places = [self._memory[at * size : (at + 1) * size] for at in range(count)]

    def write(self) -> float:
        """Seconds to copy the values in."""
        return _time(lambda: [np.copyto(place, value) for place, value in zip(self._places, self._values, strict=True)])

    def read(self) -> float:
        """Seconds to copy them out."""
        return _time(lambda: [np.copyto(out, place) for out, place in zip(self._buffers, self._places, strict=True)])


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def beside_memcpy(run: Run) -> Iterator[Figure]:
    """Puts and gets of the host store; the aim is for 256 KiB and more."""
    for size in run.sizes:
        count = max(BATCH, run.bytes_per_turn // size)
        label = f"{size // KIB}KiB"
        plain = Memcpy(size, count)
        target = Target("ratio", ">=", 0.85) if size >= 256 * KIB else None
        room = 2 * count * (size + 4096) + 16 * MIB
        with (
            HostConnector(HostConfig(max_bytes=room, copy_threads=1)) as one,
            HostConnector(HostConfig(max_bytes=room)) as every,
        ):
            stores = [Contestant(store, size, count) for store in (one, every)]
            each = 1e6 / count
            for what in ("write", "read"):
                peer, *values = alternate(
                    run.repetitions, getattr(plain, what), *(getattr(store, what) for store in stores)
                )
                for value, name, note, aim in (
                    (values[0], f"host_{what}_1_thread_{label}", "copy_threads 1; peer: memcpy", None),
                    (values[1], f"host_{what}_{label}", "host store; peer: memcpy, one thread", target),
                ):
                    yield Figure(name, scaled(value, each), "µs", scaled(peer, each), aim, note)
