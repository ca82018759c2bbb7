"""Random requests for the engine of these tests, and moods for its store."""

from __future__ import annotations

import random
from collections import deque

from faulty import FaultyStore
from offload_engine import Engine, prompt

from kvtide.hma import Item
from kvtide.kvcache.specs import Kind
from kvtide.offload.policies import Action, Event, StorePolicy

IMAGES = [{}, {"items": [Item(3, b"cat")], "image_tokens": 20}, {"items": [Item(40, b"dog")], "image_tokens": 7}]


class Traffic:
    """Requests that come, run, are preempted, come back and go, as an engine's scheduler would have it.

    New prompts begin in one of so many ways (`beginnings`).
    """

    def __init__(self, engine: Engine, store: FaultyStore, rng: random.Random, beginnings: int = 3) -> None:
        self.engine, self.store, self.rng = engine, store, rng
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.asked: deque[tuple[list[int], dict]] = deque(maxlen=100)
        self.count = 0
        self._beginnings = beginnings

    def admit(self) -> None:
        rng = self.rng
        # Half are new prompts that share a beginning; half are asked again, or go on from an earlier one.
        tokens = prompt(rng.randrange(self._beginnings), rng.randrange(20, 180)) + prompt(
            100 + self.count, rng.randrange(1, 30)
        )
        options = {"salt": rng.choice(["", "", "", "s"]), **rng.choice(IMAGES)}
        if self.asked and rng.random() < 0.5:
            tokens, options = rng.choice(self.asked)
            tokens = tokens[:250] + prompt(100 + self.count, rng.choice([0, 0, 20]))
        self.asked.append((tokens, options))
        turn_ends = [rng.randrange(1, 180)] if rng.random() < 0.3 else []
        items = [item for item in options.get("items", ()) if item.position < len(tokens)]
        options = {**options, "items": items}
        self.running.append(self.engine.admit(f"r{self.count}", tokens, turn_ends=turn_ends, **options))
        self.count += 1

    def preempt(self) -> None:
        row = self.running.pop(self.rng.randrange(len(self.running)))
        self.engine.offload.preempt(row)
        self.waiting.append(row)

    def resume(self) -> None:
        row = self.waiting.pop(self.rng.randrange(len(self.waiting)))
        self.engine.resume(row)
        self.running.append(row)

    def release(self) -> None:
        rows = self.rng.choice([rows for rows in (self.running, self.waiting) if rows])
        self.engine.offload.release(rows.pop(self.rng.randrange(len(rows))))

    def step(self) -> None:
        if self.running and not self.engine.step(self.running, self.rng.choice([1, 16, 30, 64])):
            self.preempt()
        if self.engine.has_states:
            if self.rng.random() < 0.5:
                self.engine.commit()
            for row in self.running:
                self.engine.checkpoint(row)

    def upset(self) -> None:
        """The store's mood for a while."""
        rng, store = self.rng, self.store
        store.rate = rng.choice([0, 0, 0, 0.05, 0.5])
        store.failing, store.lying = rng.random() < 0.05, rng.random() < 0.02
        store.latency_s = rng.choice([0, 0, 0.002])
        (store.gate.clear if rng.random() < 0.06 else store.gate.set)()

    def calm(self) -> None:
        self.store.gate.set()
        self.store.failing = self.store.lying = False
        self.store.rate = self.store.latency_s = 0

    def end(self) -> None:
        """All leave; nothing is left behind."""
        self.calm()
        for row in self.running + self.waiting:
            self.engine.offload.release(row)
        self.engine.flush()
        self.engine.close()
        assert self.store.open_leases == 0


def policy(rng: random.Random) -> StorePolicy:
    rules = {}
    for kinds, events in (
        (("sliding_window", "sink_window", "chunked_local", "sliding_window_mla"), list(Event)),
        (("full_attention", "mla"), [Event.COMMITTED, Event.PREEMPTED, Event.FINISHED, Event.EVICTED]),
        (("recurrent_state",), [Event.EVICTED]),
    ):
        for event in events if rng.random() < 0.5 else ():
            actions = {
                Event.COMMITTED: [Action.KEEP, Action.STORE],
                Event.EVICTED: [Action.DROP, Action.STORE],
            }.get(event, list(Action))
            rules |= {(event, kind): rng.choice(actions) for kind in kinds}
    rules = {(event, Kind(kind)): action for (event, kind), action in rules.items()}
    return StorePolicy(rules=rules, every_tokens=rng.choice([0, 0, 40]), junctions=rng.random() < 0.7)
