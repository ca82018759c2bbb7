"""Tens of minutes of random traffic through manager, offload and stores, in several processes, with faults injected.

Every store is shared by several processes: a directory of `SharedStorageConnector` by three that store and load, an
`LMDBConnector` by its writer and two readers. A schedule drawn from `--seed` kills and stops processes, makes stores
slow, hang and fail, flips and cuts off bytes of values, fills the disk and damages the index (`soak_faults.py`).
Meanwhile every query of every engine checks every byte of K/V that it reaches against the history of its tokens
(`soak_worker.py`). What is printed:

- tokens checked, and those that were wrong (a process that finds one ends at once and says so);
- what was injected, and what the stores made of it;
- processes that ended for another reason than being killed: a wrong token, a block, lease, byte, file or thread left
  over at a rest or after closing, or a crash;
- growth of memory, files and objects per hour, by a line through the samples at rest of each process that lived long;
- files left over, and the most bytes that a store held, as a share of its bound.

The disks are small tmpfs, which takes root; without, the disk is never full and the figure is null.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from report import Figure, Target, common_options, publish
from soak_faults import WEIGHTS, Ballast, Event, damage_index, damage_segments, damage_values, schedule

from kvtide.connectors.config import make_store
from kvtide.offload.store import Status

WORKER = Path(__file__).with_name("soak_worker.py")
DISK_BYTES = 20 << 20
SHARED_BYTES = 5 << 20  # small enough that values are evicted all the time
LMDB_BYTES = 6 << 20
PART_AGE_S = 5.0
GROWTH_S = 600.0  # a shorter run says nothing about growth: caches, of open segments too, still fill
# Models whose layers are of every kind that offload meets; a process may take another one each round.
LAYOUTS = ["gemma", "states", "latents", "sinks", "chunks"]


@dataclass
class Life:
    """One process from its start to its end."""

    process: subprocess.Popen[str]
    began: float
    last: dict[str, Any] = field(default_factory=dict)
    # At rests: seconds since the start, anonymous bytes, open files, and objects that Python's collector knows.
    samples: list[tuple[float, int, int, int]] = field(default_factory=list)
    ended: bool = False  # in order
    killed: bool = False
    complaint: str = ""


class Slot:
    """A place for a process, which is started again when it was killed."""

    def __init__(self, name: str, number: int, options: dict[str, Any]) -> None:
        self.name = name
        self.number = number
        self.options = options
        self.lives: list[Life] = []

    @property
    def life(self) -> Life:
        """The process that is there now."""
        return self.lives[-1]

    @property
    def is_alive(self) -> bool:
        """Whether there is one."""
        return bool(self.lives) and self.life.process.poll() is None

    def start(self) -> None:
        """Start a process."""
        options = {**self.options, "seed": f"{self.options['seed']} {self.number} {len(self.lives)}"}
        process = subprocess.Popen(
            [sys.executable, WORKER, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        life = Life(process, time.monotonic())
        self.lives.append(life)
        threading.Thread(target=self._read, args=(life,), daemon=True).start()

    def ask(self, words: str) -> None:
        """Tell the process something; one that has gone hears nothing."""
        assert self.life.process.stdin is not None
        try:
            self.life.process.stdin.write(words + "\n")
            self.life.process.stdin.flush()
        except OSError:
            pass

    def kill(self) -> None:
        """End it as the kernel would."""
        self.life.killed = True
        self.life.process.kill()
        self.life.process.wait()

    def _read(self, life: Life) -> None:
        assert life.process.stdout is not None
        for line in life.process.stdout:
            try:
                found = json.loads(line)
            except ValueError:
                continue  # killed in the middle of a line
            if found["what"] == "failed":
                life.complaint = found["reason"]
            elif found["what"] == "ended":
                life.ended = True
            else:
                life.last = found
                if found["what"] == "rest":
                    now = time.monotonic() - life.began
                    life.samples.append((now, found["anonymous_bytes"], found["files"], found["objects"]))


class Soak:
    """The processes, their stores and what goes wrong."""

    def __init__(self, shared: Path, embedded: Path, seed: int, seconds: float, *, small_disks: bool) -> None:
        self.seconds = seconds
        self.roots = {"shared": shared, "lmdb": embedded}
        self.small_disks = small_disks
        self.injected: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()
        self._ballasts = {name: Ballast(root) for name, root in self.roots.items()}
        self._later: list[tuple[float, int, Any]] = []
        self.configs: dict[str, tuple[str, dict[str, Any]]] = {
            "shared": (
                "SharedStorageConnector",
                {"shared_storage_path": str(shared / "kv"), "max_bytes": SHARED_BYTES, "part_age_s": PART_AGE_S},
            ),
            "lmdb": (
                "LMDBConnector",
                {"path": str(embedded / "kv"), "max_bytes": LMDB_BYTES, "segment_bytes": "256KiB"},
            ),
        }
        common = {
            "seed": str(seed),
            "layouts": LAYOUTS,
            "rest_s": min(8.0, seconds / 12),
            "rests": 4,
            "pause_s": 0.002,
            "beginnings": 60,
        }
        self.slots = []
        for number, (store, read_only) in enumerate([("shared", False)] * 3 + [("lmdb", False)] + [("lmdb", True)] * 2):
            connector, config = self.configs[store]
            options = {
                **common,
                "connector": connector,
                "config": {**config, "read_only": read_only},
                "read_only": read_only,
                "cleans": number in (0, 3),
                # The first of each sort keeps its engine and its store open for as long as it lives.
                "rests": 1 << 30 if number in (0, 3, 4) else 4,
            }
            self.slots.append(Slot(store, number, options))
        # Never killed, so that growth shows: one that shares, and one reader. The writer is killed in the first half.
        self._steady = {self.slots[0], self.slots[4]}

    def run(self, events: list[Event], say: Any) -> None:
        """Start everything, let the schedule happen, end everything."""
        for slot in self.slots:
            slot.start()
            if not slot.options["read_only"] and slot.name == "lmdb":
                self._wait_for_format()
        began = time.monotonic()
        waiting = [*events]
        next_look = 0.0
        while (now := time.monotonic() - began) < self.seconds:
            while waiting and waiting[0].at_s <= now:
                event = waiting.pop(0)
                say(f"{now:7.1f} s  {event.kind}")
                self._inject(event, now)
            while self._later and self._later[0][0] <= now:
                heapq.heappop(self._later)[2]()
            for slot in self.slots:
                if not slot.is_alive and not slot.life.killed and not slot.life.ended:
                    say(f"{now:7.1f} s  process {slot.number} ended: {complaint_of(slot.life)[-300:]}")
                if not slot.is_alive:
                    slot.start()
            if now >= next_look:
                next_look = now + 1.0
                for name, root in self.roots.items():
                    self.peaks[name] = max(self.peaks[name], bytes_below(root / "kv"))
            time.sleep(0.05)
        while self._later:
            heapq.heappop(self._later)[2]()
        for slot in self.slots:
            slot.ask("end")
        expires = time.monotonic() + 120
        for slot in self.slots:
            try:
                slot.life.process.wait(max(expires - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                slot.life.complaint = "did not end within two minutes of being asked to"
                slot.life.process.kill()
        time.sleep(0.2)  # readers of their output

    def leftovers(self) -> int:
        """Temporary files that are left when nobody is there and `gc` was called."""
        time.sleep(PART_AGE_S + 1)
        for connector, config in self.configs.values():
            with make_store(connector, config) as store:
                store.gc()
        names = [path.name for root in self.roots.values() for path in (root / "kv").rglob("*")]
        odd = [name for name in names if name.endswith((".part", ".clock", ".new")) or name.startswith("state.json.")]
        return len(odd)

    def last_look(self) -> Counter[str]:
        """Every value that is left, read and checked: by status."""
        found: Counter[str] = Counter()
        for connector, config in self.configs.values():
            with make_store(connector, config) as store:
                keys = [entry.key for entry in store.scan()]
                for status in store.verify(keys):
                    found[status.name] += 1
                again = store.verify(keys)
                assert Status.CORRUPT not in again, "a damaged value was neither removed nor set aside"
        return found

    def _inject(self, event: Event, now: float) -> None:
        rng = random.Random(event.draw)
        self.injected[event.kind] += 1
        if event.kind == "kill":
            spared = self._steady | ({self.slots[3]} if now > self.seconds / 2 else set())
            rng.choice([slot for slot in self.slots if slot not in spared]).kill()
        elif event.kind == "stop":
            process = rng.choice(self.slots).life.process
            process.send_signal(signal.SIGSTOP)
            self._after(now + event.lasts_s, lambda: process.send_signal(signal.SIGCONT))
        elif event.kind in ("slow", "hang", "fail"):
            rng.choice(self.slots).ask(f"{event.kind} {event.lasts_s:.3f}")
        elif event.kind == "damage":
            self.injected["values damaged"] += damage_values(self.roots["shared"] / "kv", event.draw)
            self.injected["values damaged"] += damage_segments(self.roots["lmdb"] / "kv", event.draw)
        elif event.kind == "full" and self.small_disks:
            ballast = self._ballasts[rng.choice(sorted(self._ballasts))]
            ballast.fill(event.draw)
            self._after(now + event.lasts_s, ballast.free)
        elif event.kind == "index" and now < self.seconds / 2:
            for slot in self.slots:
                if slot.name == "lmdb" and slot.is_alive:
                    slot.kill()
            damage_index(self.roots["lmdb"] / "kv", event.draw)
        else:
            self.injected[event.kind] -= 1

    def _after(self, at_s: float, call: Any) -> None:
        heapq.heappush(self._later, (at_s, len(self._later) + int(1e6 * at_s), call))

    def _wait_for_format(self) -> None:
        expires = time.monotonic() + 30
        while not (self.roots["lmdb"] / "kv" / "state.json").exists() and time.monotonic() < expires:
            time.sleep(0.05)


def complaint_of(life: Life) -> str:
    """Why a process ended."""
    if life.complaint:
        return life.complaint
    assert life.process.stderr is not None
    return life.process.stderr.read().strip() or f"exit code {life.process.returncode}"


def bytes_below(root: Path) -> int:
    """Bytes of files, but for what was set aside as damaged."""
    total = 0
    for directory, names, files in os.walk(root):
        if "quarantine" in names:
            names.remove("quarantine")
        for name in files:
            try:
                total += os.stat(os.path.join(directory, name)).st_size  # noqa: PTH116, PTH118  (hot)
            except FileNotFoundError:
                continue
    return total


def growth_per_hour(samples: list[tuple[float, int, int, int]], which: int) -> float:
    """Slope of a line through the samples after the first third: the median of all slopes between two of them."""
    late = [sample for sample in samples if sample[0] > samples[-1][0] / 3]
    step = max(1, len(late) // 60)
    late = late[::step]
    slopes = [
        (b[which] - a[which]) / (b[0] - a[0]) for at, a in enumerate(late) for b in late[at + 1 :] if b[0] - a[0] > 1
    ]
    return 3600 * statistics.median(slopes) if slopes else 0.0


def figures_of(soak: Soak, found: Counter[str], leftovers: int) -> list[Figure]:
    """What is reported."""
    lives = [life for slot in soak.slots for life in slot.lives]
    total: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for life in lives:
        total.update({name: life.last.get(name, 0) for name in ("tokens_checked", "requests", "store_tokens", "rests")})
        outcomes.update(life.last.get("outcomes", {}))
        faults.update(life.last.get("faults", {}))
    bad = [life for life in lives if not life.killed and not life.ended]
    wrong = sum("the query at" in life.complaint for life in bad)
    long_lives = [life for life in lives if life.samples and life.samples[-1][0] > 0.4 * soak.seconds]
    if soak.seconds < GROWTH_S:
        long_lives = []  # caches still fill
    memory = [growth_per_hour(life.samples, 1) for life in long_lives]
    files = [growth_per_hour(life.samples, 2) for life in long_lives]
    objects = [growth_per_hour(life.samples, 3) for life in long_lives]
    none = Target("value", "<=", 0)
    corrupt = sum(count for name, count in outcomes.items() if name.endswith("CORRUPT"))
    figures = [
        Figure("tokens_checked", total["tokens_checked"], "tokens", note="K/V bytes read by a query and right"),
        Figure("wrong_tokens", wrong, "queries", target=none, note="queries that read a wrong byte"),
        Figure("unexpected_ends", len(bad), "processes", target=none, note="anything left over, wrong, or a crash"),
        Figure("requests", total["requests"], "requests", note="admitted, in all processes"),
        Figure(
            "tokens_from_store",
            total["store_tokens"],
            "tokens",
            target=Target("value", ">", 0),
            note="loaded, not computed",
        ),
        Figure("rests", total["rests"], "rests", note="moments at which nothing may be held, and nothing was"),
        Figure(
            "values_damaged", soak.injected["values damaged"], "values", note="bytes flipped, cut, swapped, removed"
        ),
        Figure("values_found_corrupt", corrupt, "values", note="by reads, and never served"),
        Figure("lives", len(lives), "processes", note=f"started, for {len(soak.slots)} at a time"),
    ]
    figures += [
        Figure(f"injected/{kind}", None if kind == "full" and not soak.small_disks else soak.injected[kind], "times")
        for kind in WEIGHTS
    ]
    longest = max((life.samples[-1][0] for life in long_lives), default=0.0) / 60
    figures += [
        Figure(
            "memory_growth",
            max(memory) / 2**20 if memory else None,
            "MiB/h",
            target=Target("value", "<=", 16),
            note=f"the most of {len(memory)} long lives, up to {longest:.1f} min",
        ),
        Figure(
            "file_growth", max(files) if files else None, "files/h", target=Target("value", "<=", 1), note="the same"
        ),
        Figure(
            "object_growth",
            max(objects) if objects else None,
            "objects/h",
            target=Target("value", "<=", 1000),
            note="the same; of those that the garbage collector tracks",
        ),
        Figure("files_left_over", leftovers, "files", target=none, note="unfinished files after gc"),
        Figure(
            "shared_peak",
            soak.peaks["shared"] / SHARED_BYTES,
            "fraction",
            target=Target("value", "<=", 1 + 3 / 16),
            note="of max_bytes; three engines may exceed it by 3/16 for a moment",
        ),
        Figure(
            "lmdb_peak",
            soak.peaks["lmdb"] / LMDB_BYTES,
            "fraction",
            target=Target("value", "<=", 1),
            note="of max_bytes",
        ),
        Figure("values_at_the_end", found["HIT"], "values", note="read and right when all had ended"),
        Figure("corrupt_at_the_end", found["CORRUPT"], "values", note="damaged, not read before; removed then"),
    ]
    for name, count in sorted(faults.items()):
        figures.append(Figure(f"faults/{name}", count, "times", note="as the stores counted, in rounds that ended"))
    return figures


@contextmanager
def disks() -> Iterator[tuple[Path, Path, bool]]:
    """Two folders for the stores, on small file systems of their own where that is possible."""
    with tempfile.TemporaryDirectory() as folder:
        roots = [Path(folder) / name for name in ("shared", "lmdb")]
        mounted = []
        for root in roots:
            root.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs", str(root)]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                mounted.append(root)
        try:
            yield roots[0], roots[1], len(mounted) == 2
        finally:
            for root in mounted:
                subprocess.run(["umount", "-l", str(root)], check=True)


@click.command(help=__doc__)
@common_options
@click.option("--minutes", type=click.FloatRange(min=0.1), default=20.0, show_default=True, help="How long.")
@click.option("--seed", type=int, default=1, show_default=True, help="Draws the faults and all traffic.")
def main(quick: bool, smoke: bool, json_file: Path | None, minutes: float, seed: int) -> None:
    """Run it, print the figures; exit code 1 if anything was wrong."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and disks go in any case
    seconds = 12.0 if smoke else 40.0 if quick else 60 * minutes
    with disks() as (shared, embedded, small):
        if not small:
            click.echo("no tmpfs could be mounted (that takes root): the disk will not be full", err=True)
        soak = Soak(shared, embedded, seed, seconds, small_disks=small)
        events = schedule(seed, seconds, every_s=1.5 if seconds < 60 else 2.5)
        try:
            soak.run(events, lambda text: click.echo(text, err=True))
            leftovers = soak.leftovers()
            found = soak.last_look()
        finally:
            for slot in soak.slots:
                if slot.is_alive:
                    slot.kill()
    figures = figures_of(soak, found, leftovers)
    publish(f"soak, {seconds / 60:.1f} minutes, seed {seed}", figures, json_file)
    for slot in soak.slots:
        for life in slot.lives:
            if not life.killed and not life.ended:
                click.echo(f"process {slot.number}: {complaint_of(life)}", err=True)
    sys.exit(int(any(figure.met is False for figure in figures)))


if __name__ == "__main__":
    main()
