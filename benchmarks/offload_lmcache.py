"""The part of `offload.py` that runs LMCache's own benchmark of its adapters, and ours on the same sizes, in turns."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from offload_stores import BATCH, KIB, MIB, Contestant, Run
from report import Figure, Target

from kvtide.connectors.lmdb import LMDBConfig, LMDBConnector
from kvtide.connectors.shared_storage import SharedStorageConfig, SharedStorageConnector
from kvtide.offload.store import Store

_TARGETS = {
    256 * KIB: (Target("ratio", ">=", 5), Target("ratio", ">=", 2)),
    4 * MIB: (Target("ratio", ">=", 1), Target("ratio", ">=", 1)),
}
_TURNS = 3


def beside_lmcache(run: Run) -> Iterator[Figure]:
    """Store and load of adapters fs and fs_native against both stores; µs per value."""
    if run.lmcache is None:
        print("no LMCache: give --lmcache-python", file=sys.stderr)
        return
    for size, targets in _TARGETS.items():
        count = max(BATCH, run.bytes_per_turn // 2 // size // BATCH * BATCH)
        times: dict[str, list[tuple[float, float]]] = {}
        for _ in range(_TURNS):
            for adapter in ("fs", "fs_native"):
                times.setdefault(adapter, []).append(_peer(run, run.lmcache, adapter, size, count))
            for store in _stores(run, size, count):
                times.setdefault(store.name, []).append(_own(store, size, count))
        label = f"{size // KIB}KiB"
        for name in ("lmdb", "shared_storage"):
            for adapter in ("fs", "fs_native"):
                for at, what in enumerate(("store", "load")):
                    value = statistics.median(each[at] for each in times[name])
                    peer = statistics.median(each[at] for each in times[adapter])
                    yield Figure(f"{what}_{name}_{adapter}_{label}", value, "µs", peer, targets[at], f"peer: {adapter}")


def _stores(run: Run, size: int, count: int) -> Iterator[Store]:
    room = 2 * count * (size + (1 << 16)) + 16 * MIB
    yield LMDBConnector(LMDBConfig(path=str(run.new("lmdb")), max_bytes=room, durability="none"))
    yield SharedStorageConnector(SharedStorageConfig(shared_storage_path=str(run.new("shared"))))


def _own(store: Store, size: int, count: int) -> tuple[float, float]:
    """µs per value to store and to load new values, after as much of a warm-up as LMCache's tool makes."""
    with store:
        Contestant(store, size, count).write()
        contestant = Contestant(store, size, count)
        return 1e6 * contestant.write() / count, 1e6 * contestant.read() / count


def _peer(run: Run, python: Path, adapter: str, size: int, count: int) -> tuple[float, float]:
    place = run.new(adapter)
    output = place / "result.json"
    values = place / "values"
    values.mkdir()
    # fmt: off
    arguments = ["bench", "l2", "--l2-adapter", json.dumps({"type": adapter, "base_path": str(values)}),
                 "--num-keys", str(count), "--data-size-kb", str(size // KIB), "--rounds", "1", "--warmup-rounds", "1",
                 "--format", "json", "--output", str(output)]
    # fmt: on
    quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
    done = subprocess.run(
        [python.parent / "lmcache", *arguments], env=os.environ | quiet, capture_output=True, text=True, check=False
    )
    if done.returncode or not output.exists():
        raise RuntimeError(f"lmcache bench l2 failed: {done.stderr[-500:]}")
    measured = {each.get("operation"): each for each in json.loads(output.read_text())["metrics"].values()}
    if any(measured[what]["total_success"] != count for what in ("Store", "Load")):
        raise RuntimeError(f"LMCache's {adapter} did not store and load everything: {measured}")
    time.sleep(0.1)
    return 1e3 * measured["Store"]["latency_per_key_ms"], 1e3 * measured["Load"]["latency_per_key_ms"]
