"""The part of `offload.py` about many objects: what each costs in the index and in memory, and how long opening is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offload_stores import Run, fill
from report import Figure

# An index that is lost is rebuilt from the headers on the disk; a page each, so fewer of them.
_REBUILT = 100_000

_OPEN = """
import json, os, sys, time
from kvtide.connectors.lmdb import LMDBConfig, LMDBConnector
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident()
start = time.perf_counter()
store = LMDBConnector(LMDBConfig(path=sys.argv[1], max_bytes="1TiB", durability="none"))
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "bytes": resident() - before, "how": store.recovered,
                  "values": store.stats().num_values}), flush=True)
if sys.argv[2] == "close":
    store.close()
else:
    os.kill(os.getpid(), 9)
"""


def many_objects(run: Run) -> Iterator[Figure]:
    """Bytes per object, and the time to open: after closing, after a kill, and without the index."""
    path = run.new("metadata")
    count = run.objects
    fill(path, count)
    note = f"{count:,} objects"
    index_bytes = (path / "index" / "data.mdb").stat().st_size
    yield Figure("index_bytes_per_object", index_bytes / count, "B", note=note)
    sealed = _open(path, "kill", "sealed", count)
    yield Figure("memory_bytes_per_object", sealed["bytes"] / count, "B", note=f"writer, LRU, {note}")
    yield Figure("open_after_close", sealed["seconds"], "s", note=note)
    yield Figure("open_after_kill", _open(path, "close", "checked", count)["seconds"], "s", note=note)
    shutil.rmtree(path)
    count = min(count, _REBUILT)
    path = run.new("rebuild")
    fill(path, count, headers=True)
    shutil.rmtree(path / "index")
    note = f"{count:,} objects, headers in the page cache"
    yield Figure("open_without_index", _open(path, "close", "rebuilt", count)["seconds"], "s", note=note)


def _open(path: Path, end: str, how: str, count: int) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", _OPEN, str(path), end], capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout or "{}")
    if (found.get("how"), found.get("values")) != (how, count):
        raise RuntimeError(f"expected {count} values, {how}; got {found}: {done.stderr}")
    return found
