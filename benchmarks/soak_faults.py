"""What goes wrong in a soak, and when: a schedule drawn from a seed, and the hands that do it.

kill        a worker dies by kill -9 and is started again
stop        a worker stands still for some seconds, as in a machine that is paused
slow, hang, fail    a worker's store answers late, not at all, or with errors for some seconds
damage      values' bytes are flipped, overwritten, cut off, swapped, or their files removed
full        something else fills the file system for some seconds
index       every process of the embedded store dies and its index is damaged or removed before they come back
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from pathlib import Path
from typing import NamedTuple

# How often each kind comes up, and the seconds that it lasts.
WEIGHTS = {"kill": 5, "stop": 2, "slow": 3, "hang": 3, "fail": 2, "damage": 6, "full": 2, "index": 1}
LASTS_S = {"stop": (0.5, 3.0), "slow": (2.0, 6.0), "hang": (0.5, 4.0), "fail": (0.5, 3.0), "full": (3.0, 8.0)}


class Event(NamedTuple):
    """One fault: seconds from the start, what, for how long, and a number that says to whom and how."""

    at_s: float
    kind: str
    lasts_s: float
    draw: int


def schedule(seed: int, seconds: float, every_s: float) -> list[Event]:
    """Faults at random times, `every_s` apart on average; every kind comes up at least once, none in the last tenth."""
    rng = random.Random(f"faults {seed}")
    count = max(int(0.9 * seconds / every_s), len(WEIGHTS))
    kinds = [*WEIGHTS, *rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count - len(WEIGHTS))]
    rng.shuffle(kinds)
    times = sorted(rng.uniform(0.03, 0.9) * seconds for _ in kinds)
    lasts = [min(rng.uniform(*LASTS_S.get(kind, (0, 0))), 0.1 * seconds) for kind in kinds]
    return [Event(*each, rng.getrandbits(32)) for each in zip(times, kinds, lasts, strict=True)]


def damage_values(root: Path, draw: int) -> int:
    """Damage some values of a shared tree; the number of files."""
    rng = random.Random(draw)
    files = sorted(root.rglob("*.kv"))
    done = 0
    for path in rng.sample(files, min(len(files), rng.choice([1, 5, 20]))):
        done += damage_file(path, rng.choice(["flip", "flip", "cut", "zero", "swap", "remove"]), rng, rng.choice(files))
    return done


def damage_segments(root: Path, draw: int) -> int:
    """Damage values in the segments of an embedded store, under its feet; the number of places."""
    rng = random.Random(draw)
    done = 0
    for path in sorted((root / "segments").glob("*.segment")):
        if rng.random() < 0.4:
            for _ in range(rng.choice([1, 4, 16])):
                done += damage_file(path, rng.choice(["flip", "flip", "flip", "zero"]), rng)
            if rng.random() < 0.1:
                done += damage_file(path, "cut", rng)
    return done


def damage_index(root: Path, draw: int) -> str:
    """Damage or remove the index of an embedded store that nobody has open; what was done."""
    rng = random.Random(draw)
    data = root / "index" / "data.mdb"
    kind = rng.choice(["flip", "zero", "cut", "remove", "remove state"])
    if kind == "remove":
        shutil.rmtree(root / "index", ignore_errors=True)
    elif kind == "remove state":
        (root / "state.json").unlink(missing_ok=True)
    elif data.exists():
        for _ in range(rng.choice([1, 10])):
            damage_file(data, kind, rng)
    return kind


def damage_file(path: Path, kind: str, rng: random.Random, other: Path | None = None) -> bool:
    """Flip a bit, zero some bytes, cut the file off, copy another over it, or remove it; whether it could be done.

    It cannot where the file has been evicted meanwhile, or the disk is full just now.
    """
    try:
        if kind == "remove":
            path.unlink()
        elif kind == "swap" and other is not None:
            path.write_bytes(other.read_bytes())
        else:
            with path.open("r+b", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                at = rng.randrange(size or 1)
                if kind == "cut":
                    file.truncate(at)
                elif kind == "zero":
                    os.pwrite(file.fileno(), bytes(min(rng.choice([8, 512, 4096]), size - at)), at)
                elif size:
                    (byte,) = os.pread(file.fileno(), 1, at) or b"\0"
                    os.pwrite(file.fileno(), bytes([byte ^ 1 << rng.randrange(8)]), at)
    except OSError:
        return False
    return True


class Ballast:
    """Fills a file system, but for a little, and lets go again."""

    def __init__(self, root: Path) -> None:
        self._file = root / "ballast"

    def fill(self, draw: int) -> None:
        """Leave no more than some pages."""
        left = random.Random(draw).choice([0, 4096, 100_000])
        found = os.statvfs(self._file.parent)
        size = max(found.f_bavail * found.f_frsize - left, 1)
        # Where somebody else is faster it is full all the same.
        with contextlib.suppress(OSError), self._file.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)

    def free(self) -> None:
        """Give the room back."""
        self._file.unlink(missing_ok=True)
