"""Token-level proof: an attention that reads keys and values through the block tables equals one over the true history.

A float32 arena is laid out as the geometry says. Every token of every layer is written at the place that its slot
means; everything that was never written, and every block that is free, is NaN. Before a step's outputs are compared,
each query reads what its kind can see, as a kernel would: table entry, unit, layer, component, token. States are
vectors that stand for all tokens they have seen. The engine around it (`oracle.Engine`) makes the traffic: shared
prefixes, chunks, drafts that are rejected and overwritten, steps in flight, preemption, checkpoints, restored states.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test
from layouts import layout_of, sees
from machine import QUIET, STEMS, ManagerMachine, geometries
from oracle import Engine, Entry, Member, geometry_of

from kvtide.hma import Item
from kvtide.kvcache import (
    MLA,
    ChunkedLocal,
    Component,
    CrossAttention,
    FullAttention,
    Layer,
    LayerSpec,
    ModelLayout,
    RecurrentState,
    SinkWindow,
    SlidingWindow,
    SlidingWindowMLA,
)
from kvtide.kvcache.geometry import PageGeometry

Floats = np.ndarray[Any, np.dtype[np.float32]]


class ArenaEngine(Engine):
    """An engine whose device is a real arena of float32 words, poisoned with NaN."""

    def __init__(self, geometry: PageGeometry, num_pages: int, **options: Any) -> None:
        super().__init__(geometry, num_pages, **options)
        self.arena: Floats = np.full(num_pages * geometry.page_bytes // 4, np.nan, dtype=np.float32)
        self.truth: dict[tuple[Any, ...], Floats] = {}
        self.images: set[tuple[str, int]] = set()
        self.queries = self.tokens_read = 0

    # -- where things lie ---------------------------------------------------------------------------------------------

    def block(self, group: int, entry: Entry) -> Floats:
        start = entry * self.unit // 4
        return self.arena[start : start + self.block_bytes[group] // 4]

    def place(self, group: int, entry: Entry, layer: int, component: Component, token: int) -> Floats:
        """One token (or the state) of one component of one layer inside a block."""
        fmt = self.formats[group]
        first = fmt.place(layer)[1] + fmt.component_offset(component.name) + token * component.num_bytes
        return self.block(group, entry)[first // 4 : (first + component.num_bytes) // 4]

    def layers(self, group: int, table: int) -> list[int]:
        fmt = self.formats[group]
        return [layer for layer in fmt.group.layers if fmt.place(layer)[0] == table]

    def true_value(self, layer: int, component: Component, *what: object) -> Floats:
        """A vector that stands for a token with its whole history, in one layer."""
        key = (layer, component.name, *what)
        if key not in self.truth:
            seed = int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest())
            self.truth[key] = np.random.default_rng(seed).standard_normal(component.num_bytes // 4, dtype=np.float32)
        return self.truth[key]

    # -- what the device does -----------------------------------------------------------------------------------------

    def poison(self, group: int, entry: Entry, table: int) -> None:
        super().poison(group, entry, table)
        self.block(group, entry)[:] = np.nan

    def write(self, group: int, entry: Entry, offset: int, value: int) -> None:
        super().write(group, entry, offset, value)
        for layer in self.layers(group, self.table_of[group, entry]):
            for component in self.formats[group].group.spec.components():
                self.place(group, entry, layer, component, offset)[:] = self.true_value(layer, component, value)

    def copy_block(self, group: int, source: Entry, destination: Entry) -> None:
        super().copy_block(group, source, destination)
        self.block(group, destination)[:] = self.block(group, source)

    def compare(self, *args: Any, **options: Any) -> None:
        super().compare(*args, **options)
        used = self.references()
        for group, entries in list(self.pages.values()):
            for entry in entries:
                if (group, entry) not in used and (group, entry) not in self.places:
                    self.block(group, entry)[:] = np.nan

    def _run_row(self, member: Member, from_activations: bool, sampled: Sequence[int]) -> None:
        start = member.request.computed
        self.check_states(member, start)
        self.write_image(member)
        super()._run_row(member, from_activations, sampled)
        queries = range(start, start + member.accepted)
        for query in queries if len(queries) < 5 else (queries[0], queries[len(queries) // 2], queries[-1]):
            for group, fmt in enumerate(self.formats):
                for layer in fmt.group.layers if fmt.block_size else ():
                    self.check_query(member, group, layer, query, start, from_activations)

    def check_states(self, member: Member, start: int) -> None:
        for group, fmt in enumerate(self.formats):
            for layer in fmt.group.layers if start and not fmt.block_size else ():
                entry = member.tables[group][fmt.place(layer)[0], 0]
                for component in fmt.group.spec.components():
                    found = self.place(group, entry, layer, component, 0)
                    true = self.true_value(layer, component, member.request.chain[start - 1])
                    self.queries += 1
                    assert np.array_equal(found, true), f"state of layer {layer} at {start}"

    def write_image(self, member: Member) -> None:
        request = member.request
        if (request.name, request.life) in self.images:
            return
        self.images.add((request.name, request.life))
        for group, fmt in enumerate(self.formats):
            for layer in fmt.group.layers if isinstance(fmt.group.spec, CrossAttention) else ():
                for j in range(request.image_tokens):
                    entry = member.tables[group][fmt.place(layer)[0], j // fmt.block_size]
                    for component in fmt.group.spec.components():
                        value = self.true_value(layer, component, "image", request.name, j)
                        self.place(group, entry, layer, component, j % fmt.block_size)[:] = value

    # -- attention ----------------------------------------------------------------------------------------------------

    def check_query(
        self, member: Member, group: int, layer: int, query: int, start: int, from_activations: bool
    ) -> None:
        fmt, request = self.formats[group], member.request
        spec = fmt.group.spec
        is_cross = isinstance(spec, CrossAttention)
        keys = list(range(request.image_tokens)) if is_cross else [k for k in range(query + 1) if sees(spec, query, k)]
        if not keys:
            return
        true_parts, read_parts = [], []
        for component in spec.components():
            true_rows, read_rows = [], []
            for k in keys:
                what = ("image", request.name, k) if is_cross else (request.chain[k],)
                true = self.true_value(layer, component, *what)
                entry = member.tables[group].get((fmt.place(layer)[0], k // fmt.block_size))
                true_rows.append(true)
                if entry is None:
                    assert from_activations, f"layer {layer}: the query at {query} needs token {k}, which has no slot"
                    assert k >= start, f"layer {layer}: the query at {query} needs token {k}, which has no slot"
                    read_rows.append(true)
                else:
                    read_rows.append(self.place(group, entry, layer, component, k % fmt.block_size))
            true_parts.append(np.stack(true_rows))
            read_parts.append(np.stack(read_rows))
        self.queries += 1
        self.tokens_read += len(keys)
        expected, found = attend(spec, true_parts, query), attend(spec, read_parts, query)
        assert np.array_equal(found, expected), f"{fmt.group.name}, layer {layer}: attention of the query at {query}"


def attend(spec: LayerSpec, parts: Sequence[Floats], query: int) -> Floats:
    """Softmax attention of one query vector; for MLA the latent is both key and value, and an indexer weighs in.

    By einsum: BLAS multiplies what lies beside odd shapes too, and then raises flags that depend on that.
    """
    keys, values = parts[0], parts[-1]
    rng = np.random.default_rng(query)
    scores = np.einsum("kd,d->k", keys, rng.standard_normal(keys.shape[1], dtype=np.float32))
    if isinstance(spec, MLA | SlidingWindowMLA):
        values = keys
        if len(parts) == 2:
            weights = rng.standard_normal(parts[1].shape[1], dtype=np.float32)
            scores = scores + np.einsum("kd,d->k", parts[1], weights)
    weights = np.exp(scores - scores.max())
    return np.asarray(np.einsum("k,kd->d", weights, values) / weights.sum(), dtype=np.float32)


def full(heads: int = 1) -> FullAttention:
    return FullAttention(heads, 2, 2, "float32")


def window(size: int) -> SlidingWindow:
    return SlidingWindow(1, 2, 1, "float32", window=size)


def state(name: str = "ssm") -> RecurrentState:
    return RecurrentState((Component("conv", (1, 2), "float32"), Component(name, (2, 2), "float32")))


LAYOUTS = {
    "full": [(2, full(), 4)],
    "sliding window": [(2, window(9), 4)],
    "window of one token": [(1, window(1), 2)],
    "full and window": [(2, full(), 4), (3, window(6), 2)],
    "full and two windows": [(1, full(), 8), (2, window(3), 2), (2, window(12), 4)],
    "chunked local": [(2, ChunkedLocal(1, 1, 2, "float32", chunk=8), 4)],
    "chunks that no block divides": [(1, full(), 4), (2, ChunkedLocal(1, 1, 2, "float32", chunk=6), 4)],
    "sinks and window": [(2, SinkWindow(1, 2, 2, "float32", window=7, sinks=5), 4)],
    "full and sinks": [(1, full(), 4), (2, SinkWindow(1, 2, 2, "float32", window=5, sinks=1), 2)],
    "MLA": [(2, MLA(3, 1, "float32"), 4)],
    "MLA with indexer": [(2, MLA(3, 1, "float32", 128), 4)],
    "window MLA": [(1, MLA(3, 1, "float32"), 4), (2, SlidingWindowMLA(2, 2, "float32", window=6), 4)],
    "cross attention": [(2, full(), 4), (2, CrossAttention(1, 2, 2, "float32"), 4)],
    "state": [(2, state(), 0)],
    "state and full": [(3, state(), 0), (1, full(), 4)],
    "two states, full, window": [(1, state(), 0), (2, state("gdn"), 0), (1, full(2), 4), (2, window(5), 4)],
}


def small_geometry(name: str, tables: int) -> PageGeometry:
    layout = layout_of(name, *((count, spec) for count, spec, _ in LAYOUTS[name]))
    shared = Layer(len(layout.layers), None, shares=0)
    layout = ModelLayout(name, (*layout.layers, shared))
    sizes = {group.name: size for group, (_, _, size) in zip(layout.groups, LAYOUTS[name], strict=True)}
    cuts = {group.name: tables if len(group.layers) % tables == 0 else 1 for group in layout.groups}
    return geometry_of(layout, sizes, cuts, page_factor=2, page_tail=8)


def traffic(engine: Engine, rng: random.Random, operations: int) -> None:
    """Random traffic, about as an engine makes it: prompts in chunks, decode with drafts, two steps in flight."""
    kinds = ["admit", "admit", *["step"] * 6, *["commit"] * 6, "preempt", "resume", "release"]
    admitted = 0
    for _ in range(operations):
        running = [name for name, request in engine.requests.items() if request.running]
        waiting = [name for name, request in engine.requests.items() if not request.running]
        operation = rng.choice(kinds)
        if operation == "admit" and len(engine.requests) < 5:
            prompt = [*rng.choice(STEMS)[: rng.randint(1, 30)], *(rng.randint(0, 1) for _ in range(rng.randint(0, 3)))]
            items = [Item(rng.randrange(len(prompt)), rng.choice([b"cat", b"dog"]))] if rng.random() < 0.2 else []
            image = rng.choice([0, 3, 9])
            admitted += 1
            engine.admit(f"r{admitted}", prompt, items=items, image_tokens=image, salt=rng.choice(["", "", "s"]))
        elif operation == "step" and len(engine.steps) < engine.max_steps:
            names = [name for name in running if engine.can_reserve(name) and engine.room(name)]
            counts = []
            for name in names:
                left = len(engine.requests[name].prompt) - engine.max_model_len + engine.room(name)
                counts.append(min(engine.room(name), rng.choice([4, 9, 16, 24]) if left > 0 else rng.randint(1, 4)))
            is_decode = rng.random() < 0.7
            engine.reserve(
                names,
                counts,
                num_drafts=[count - 1 if is_decode and count < 5 else 0 for count in counts],
                from_activations=engine.skips and rng.random() < 0.7,
                fractions=[rng.random() for _ in names],
                at_once=rng.random() < 0.5,
            )
        elif operation == "commit" and engine.steps:
            engine.commit([rng.randint(0, 1) for _ in range(3)])
            for name in running if engine.has_states else ():
                if engine.can_checkpoint(name):
                    engine.checkpoint(name)
        elif operation == "preempt" and running:
            engine.preempt(rng.choice(running))
        elif operation == "resume" and waiting:
            engine.resume(rng.choice(waiting))
        elif operation == "release" and engine.requests:
            engine.release(rng.choice(list(engine.requests)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_through_tables_is_attention_over_history(name: str) -> None:
    queries = hits = 0
    for seed in range(4):
        rng = random.Random(f"{name} {seed}")
        engine = ArenaEngine(
            small_geometry(name, tables=rng.choice([1, 2])),
            rng.choice([25, 60, 200]),
            max_model_len=56,
            max_requests=5,
            lookahead=rng.choice([0, 0, 3]),
            skips=seed % 2 == 0,
        )
        traffic(engine, rng, 100)
        queries += engine.queries
        hits += engine.hits
    assert queries > 200
    assert hits > 0


class ArenaMachine(ManagerMachine):
    """The same machine over random models of float32."""

    engine_class = ArenaEngine

    @initialize(
        geometry=geometries("float32"),
        num_pages=st.sampled_from([12, 50, 200]),
        lookahead=st.sampled_from([0, 1, 3]),
        caching=st.just(True),
        drop_last=st.booleans(),
        max_steps=st.sampled_from([1, 2]),
        skips=st.booleans(),
    )
    def begin(self, geometry: PageGeometry, num_pages: int, **options: Any) -> None:
        super().begin(geometry, num_pages, **options)


def test_attention_of_random_models() -> None:
    run_state_machine_as_test(
        ArenaMachine,
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=QUIET,
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        ),
    )


def test_the_proof_sees_a_wrong_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that slides one token too far is found."""
    engine = ArenaEngine(small_geometry("sliding window", 1), 50, max_model_len=56, max_requests=2)
    engine.admit("r", STEMS[0][:20])
    engine.reserve(["r"], [20])
    engine.commit()
    for held in engine.requests["r"].held.values():
        for entry in list(held.values())[:1]:
            engine.block(0, entry)[:] = np.nan
    engine.reserve(["r"], [1])
    with pytest.raises(AssertionError, match="attention of the query"):
        engine.commit()
