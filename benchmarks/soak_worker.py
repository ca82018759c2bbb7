"""One process of `soak.py`: an engine under random traffic on a shared store, every token that it reads checked.

    soak_worker.py '{"seed": "7 2 0", "layouts": ["gemma"], "connector": ..., "config": {...}, ...}'

Rounds, each with an engine and a store opened anew, until "end" is read or the process is killed. A round now and then
comes to rest: all requests leave, and nothing may be held any more. At every rest one line of JSON says what was done;
at the end of a round everything is closed, and neither file nor thread may be left. What the engine of `tests/offload`
checks is every token's bytes against a hash of its whole history, so one wrong byte ends the process with an error.

Lines read: `slow S`, `hang S`, `fail S` (for S seconds the store's calls take up to 50 ms, hang, or answer ERROR), and
`end`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "offload")]

from faulty import FaultyStore  # noqa: E402
from offload_engine import Engine  # noqa: E402
from offload_layouts import LAYOUTS  # noqa: E402
from offload_traffic import Traffic, policy  # noqa: E402

from kvtide.connectors.config import make_store  # noqa: E402
from kvtide.kvcache import ConfigError  # noqa: E402
from kvtide.offload.policies import StorePolicy  # noqa: E402

C = ctypes.CDLL(None)
PATIENCE_S = 60.0
DEADLINE_S = 1.0


class Worker:
    """The traffic of one process."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.rng = random.Random(f"soak {options['seed']}")
        self.store: FaultyStore | None = None
        self.ending = threading.Event()
        self.tokens_checked = self.requests = self.store_tokens = self.rests = self.rounds = 0
        self._told = 0, 0  # requests and tokens from the store of this round that are counted already
        self.faults: dict[str, int] = {}
        self.outcomes: dict[str, int] = {}

    def run(self) -> None:
        """Round after round."""
        self.round(rests=1)  # what libraries keep for the process is there from now on
        while not self.ending.is_set():
            gc.collect()
            before = open_files(), threading.active_count()
            self.round(self.options["rests"])
            after = self.settled(before)
            assert after <= before, f"files and threads before and after a round: {before}, {after}"

    def settled(self, before: tuple[int, int]) -> tuple[int, int]:
        """Files and threads, given a few seconds to end."""
        expires = time.monotonic() + 5
        while True:
            gc.collect()
            after = open_files(), threading.active_count()
            if (after[0] <= before[0] and after[1] <= before[1]) or time.monotonic() > expires:
                return max(after[0], before[0]), max(after[1], before[1])
            time.sleep(0.05)

    def round(self, rests: int) -> None:
        """An engine and a store, from opening to closing."""
        rng = self.rng
        self.store = FaultyStore(self.open(), self.options["seed"])
        engine = Engine(
            LAYOUTS[rng.choice(self.options["layouts"])],
            self.store,
            pages=rng.choice([40, 60, 120]),
            staging_bytes=rng.choice([1 << 20, 100_000]),
            deadline=DEADLINE_S,
            drop_last_block=rng.random() < 0.2,
            ahead=rng.random() < 0.5,
            store_policy=StorePolicy() if rng.random() < 0.5 else policy(rng),
            stores=not self.options["read_only"],
        )
        traffic = Traffic(engine, self.store, rng, beginnings=self.options["beginnings"])
        self._told = 0, 0
        for _ in range(rests):
            self.until_rest(traffic)
            self.rest(traffic)
            if self.ending.is_set():
                break
        self.wait_for_the_store()
        engine.close()
        assert self.store.open_leases == 0
        self.store.close()
        for (operation, status), count in self.store.stats().outcomes.items():
            name = f"{operation} {status.name}"
            self.outcomes[name] = self.outcomes.get(name, 0) + count
        for name, count in self.store.stats().faults.items():
            self.faults[name] = self.faults.get(name, 0) + count
        self.rounds += 1
        self.tell("round")

    def open(self) -> Any:
        """The store; a reader may come while the writer is away and the index waits for it."""
        expires = time.monotonic() + PATIENCE_S
        while True:
            try:
                return make_store(self.options["connector"], self.options["config"])
            except ConfigError:
                if time.monotonic() > expires:
                    raise
                time.sleep(0.2)

    def until_rest(self, traffic: Traffic) -> None:
        """Traffic for some seconds."""
        rng, engine = self.rng, traffic.engine
        expires = time.monotonic() + self.options["rest_s"]
        while time.monotonic() < expires and not self.ending.is_set():
            if len(traffic.running) + len(traffic.waiting) < 4 and rng.random() < 0.5:
                traffic.admit()
            if traffic.waiting and rng.random() < 0.4:
                traffic.resume()
            action = rng.random()
            if traffic.running and action < 0.07:
                traffic.preempt()
            elif (traffic.running or traffic.waiting) and action < 0.2:
                traffic.release()
            elif action < 0.23:
                engine.manager.reset_cache()
            engine.offload.poll()
            traffic.step()
            engine.manager.check()
            for name in engine.texts.keys() - set(engine.names.values()):
                del engine.texts[name]
            time.sleep(self.options["pause_s"])

    def rest(self, traffic: Traffic) -> None:
        """All requests leave; no block, byte or lease is held."""
        engine, store = traffic.engine, traffic.store
        for row in traffic.running + traffic.waiting:
            engine.offload.release(row)
        traffic.running.clear()
        traffic.waiting.clear()
        self.wait_for_the_store()
        expires = time.monotonic() + PATIENCE_S
        engine.commit()
        while engine.offload.stats().held_bytes or not engine.transfers.drain(0.01):
            engine.offload.poll()
            assert time.monotonic() < expires, "puts and loads do not end"
        engine.offload.poll()
        stats = engine.offload.stats()
        assert (stats.held_bytes, stats.rows_on_their_way) == (0, 0)
        assert stats.staging_bytes_free == engine.transfers.staging_bytes
        while store.open_leases and time.monotonic() < expires:
            time.sleep(0.01)  # a look-up that was given up may still be on its worker
        assert store.open_leases == 0, f"{store.open_leases} leases are left"
        engine.manager.check()
        assert engine.manager.pool.refs.sum() == 0
        self.tokens_checked += engine.tokens_checked
        engine.tokens_checked = 0
        requests, store_tokens = traffic.count, engine.offload.stats().tokens.get("store", 0)
        self.requests += requests - self._told[0]
        self.store_tokens += store_tokens - self._told[1]
        self._told = requests, store_tokens
        if self.options["cleans"]:
            store.store.gc()
        self.rests += 1
        self.tell("rest")

    def wait_for_the_store(self) -> None:
        """Until it no longer hangs."""
        assert self.store is not None
        assert self.store.gate.wait(PATIENCE_S)

    def tell(self, what: str) -> None:
        """One line about now."""
        gc.collect()
        if hasattr(C, "malloc_trim"):
            C.malloc_trim(0)  # what the C library keeps of freed memory is no growth
        line = {
            "what": what,
            "anonymous_bytes": anonymous_bytes(),
            "files": open_files(),
            "threads": threading.active_count(),
            "objects": len(gc.get_objects()),
            "tokens_checked": self.tokens_checked,
            "requests": self.requests,
            "store_tokens": self.store_tokens,
            "rests": self.rests,
            "rounds": self.rounds,
            "faults": self.faults,
            "outcomes": self.outcomes,
        }
        print(json.dumps(line), flush=True)

    def listen(self) -> None:
        """Do what is asked for on stdin."""
        for line in sys.stdin:
            word, _, seconds = line.strip().partition(" ")
            if word == "end":
                self.ending.set()
                continue
            store = self.store
            if store is None:
                continue
            if word == "hang":
                store.gate.clear()
            elif word == "fail":
                store.failing = True
            else:
                store.latency_s = 0.05
            time.sleep(float(seconds))
            store.gate.set()
            store.failing, store.latency_s = False, 0.0
        self.ending.set()  # whoever asked has gone


def open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def main() -> None:
    """Run until the end; exit code 1, with the reason as the last line, for whatever is wrong."""
    worker = Worker(json.loads(sys.argv[1]))
    threading.Thread(target=worker.listen, daemon=True).start()
    try:
        worker.run()
    except BaseException:
        print(json.dumps({"what": "failed", "reason": traceback.format_exc()}), flush=True)
        os._exit(1)
    print(json.dumps({"what": "ended"}), flush=True)


if __name__ == "__main__":
    main()
