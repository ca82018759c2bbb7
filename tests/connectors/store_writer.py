"""A process that stores until it is killed, and says what was acknowledged: `store_writer.py KIND PATH SEED`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from kvtide.connectors.lmdb import LMDBConfig, LMDBConnector
from kvtide.connectors.shared_storage import SharedStorageConfig, SharedStorageConnector
from kvtide.offload.conformance import key_of, value_of
from kvtide.offload.store import Status, Store

SIZES = (1000, 9000, 70_000, 600_000)


def size_of(number: int) -> int:
    """The length of the `number`-th value."""
    return SIZES[number % len(SIZES)]


def open_store(kind: str, path: Path) -> Store:
    """A store large enough that nothing is evicted."""
    if kind == "lmdb":
        return LMDBConnector(LMDBConfig(path=str(path), max_bytes="2GiB", segment_bytes="4MiB", durability="none"))
    return SharedStorageConnector(SharedStorageConfig(shared_storage_path=str(path)))


def main(kind: str, path: Path, seed: int) -> None:
    """Store batches of new values, and now and then delete one, saying each once it is acknowledged."""
    rng = random.Random(seed)
    number = seed * 100_000
    with open_store(kind, path) as store:
        print("open", flush=True)
        while True:
            numbers = list(range(number, number + rng.randint(1, 4)))
            number += len(numbers)
            keys = [key_of(each) for each in numbers]
            statuses = store.put(keys, [value_of(key, size_of(each)) for key, each in zip(keys, numbers, strict=True)])
            assert set(statuses) == {Status.STORED}, statuses
            print(*numbers, flush=True)
            if rng.random() < 0.2:
                print("deleting", numbers[0], flush=True)
                store.delete(keys[:1])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
