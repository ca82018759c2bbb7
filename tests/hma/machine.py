"""Random layouts, and a hypothesis state machine that drives manager and oracle with random operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from layouts import attention_specs, state_specs
from oracle import Engine, geometry_of

from kvtide.hma import Item
from kvtide.kvcache import Layer, LayerSpec, ModelLayout, RecurrentState
from kvtide.kvcache.geometry import PageGeometry

MAX_ROWS = 5
MAX_MODEL_LEN = 56
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@st.composite
def geometries(draw: st.DrawFn, dtype: str | None = None) -> PageGeometry:
    """Layouts of one to four groups of any kinds, some layers shared, some of a drafter; blocks cut at random.

    With `dtype` every array of them has it.
    """
    specs = attention_specs(st.integers(1, 12)) | state_specs(2, 2)
    if dtype is not None:
        specs = specs.map(lambda spec: _of_dtype(spec, dtype))
    groups = draw(st.lists(specs, min_size=1, max_size=4, unique=True))
    if all(spec.per_image for spec in groups):
        groups.append(draw(specs.filter(lambda spec: not spec.per_image)))
    if draw(st.integers(0, 2)) == 0:
        state = draw(state_specs(2, 2) if dtype is None else state_specs(2, 2).map(lambda spec: _of_dtype(spec, dtype)))
        groups += [state] if state not in groups else []
    layers: list[Layer] = []
    for spec in groups:
        draft = draw(st.integers(0, 5)) == 0 and spec is not groups[0]
        for _ in range(draw(st.sampled_from([1, 1, 2, 3, 4]))):
            layers.append(Layer(len(layers), spec, draft=draft))
    if draw(st.booleans()):
        layers.append(Layer(len(layers), None, shares=0))
    layout = ModelLayout("random", tuple(layers))
    sizes = {group.name: draw(st.sampled_from([1, 2, 4, 4, 8])) for group in layout.groups}
    tables = {
        group.name: draw(st.sampled_from([n for n in range(1, len(group.layers) + 1) if len(group.layers) % n == 0]))
        for group in layout.groups
    }
    return geometry_of(layout, sizes, tables, draw(st.integers(1, 3)), draw(st.sampled_from([0, 0, 4, 12])))


def _of_dtype(spec: LayerSpec, dtype: str) -> LayerSpec:
    if isinstance(spec, RecurrentState):
        return replace(spec, arrays=tuple(array._replace(dtype=dtype) for array in spec.arrays))
    return spec.with_dtype(dtype)


STEMS = (
    tuple(int(b) for b in f"{0x5A3C96F0E1:040b}"),
    tuple(int(b) for b in f"{0x5A3C9600FF:040b}"),
    (1,) * 40,
)
prompts = st.builds(
    lambda stem, length, tail: [*STEMS[stem][:length], *tail],
    st.sampled_from([0, 0, 0, 0, 1, 2]),
    st.sampled_from([1, 8, 9, 16, 17, 18, 24, 33, 40]),
    st.lists(st.integers(0, 1), max_size=3),
)
indices = st.lists(st.integers(0, MAX_ROWS - 1), min_size=1, max_size=MAX_ROWS, unique=True)


class ManagerMachine(RuleBasedStateMachine):
    """Admit, reserve, commit, preempt, resume, release, checkpoint: in any order, with up to two steps in flight."""

    engine_class = Engine
    operations = 0
    counts: ClassVar[dict[str, int]] = {"hits": 0, "exhausted": 0, "runs": 0, "loads": 0}

    @initialize(
        geometry=geometries(),
        num_pages=st.sampled_from([6, 12, 25, 50, 100, 200, 400]),
        lookahead=st.sampled_from([0, 0, 1, 3]),
        caching=st.sampled_from([True, True, True, False]),
        drop_last=st.sampled_from([False, False, True]),
        max_steps=st.sampled_from([1, 2, 2, 3]),
        skips=st.booleans(),
    )
    def begin(self, geometry: PageGeometry, num_pages: int, **options: Any) -> None:
        self.engine = self.engine_class(
            geometry,
            num_pages,
            max_model_len=MAX_MODEL_LEN,
            skips=options["skips"],
            max_requests=MAX_ROWS,
            lookahead=options["lookahead"],
            prefix_caching=options["caching"],
            drop_last_block=options["drop_last"],
            max_steps_in_flight=options["max_steps"],
        )
        self.admitted = 0

    def running(self) -> list[str]:
        return [name for name, request in self.engine.requests.items() if request.running]

    @precondition(lambda self: len(self.engine.requests) < MAX_ROWS)
    @rule(
        prompt=prompts,
        salt=st.sampled_from(["", "", "", "other"]),
        adapter=st.sampled_from(["", "", "", "lora"]),
        items=st.lists(
            st.builds(Item, st.sampled_from([0, 2, 5, 9, 17]), st.sampled_from([b"cat", b"dog"])), max_size=2
        )
        | st.just([]),
        image_tokens=st.sampled_from([0, 0, 5, 17]),
        priority=st.integers(-3, 3),
        chunk=st.sampled_from([0, 4, 8, 24]),
        loads=st.booleans(),
    )
    def admit(self, prompt: list[int], items: list[Item], chunk: int, loads: bool, **options: Any) -> None:
        items = [item for item in items if item.position < len(prompt)]
        self.admitted += 1
        name = f"r{self.admitted}"
        self.engine.admit(name, prompt, items=items, **options)
        if loads and (lengths := self.engine.load_lengths(name)) and self.engine.start_load(name, lengths[-1]):
            return
        if chunk and not self.engine.steps:
            self.compute(name, chunk, from_activations=chunk == 8, overlap=chunk == 4)

    @precondition(lambda self: len(self.engine.steps) < self.engine.max_steps and self.running())
    @rule(
        who=indices,
        sizes=st.lists(st.sampled_from([1, 1, 2, 4, 7, 16, 24]), min_size=MAX_ROWS, max_size=MAX_ROWS),
        fractions=st.lists(st.floats(0, 1), min_size=MAX_ROWS, max_size=MAX_ROWS),
        draft_all=st.booleans(),
        from_activations=st.booleans(),
        at_once=st.booleans(),
        reject=st.booleans(),
    )
    def reserve(
        self,
        who: list[int],
        sizes: list[int],
        fractions: list[float],
        draft_all: bool,
        from_activations: bool,
        at_once: bool,
        reject: bool,
    ) -> None:
        running = self.running()
        names = [running[i] for i in who if i < len(running)]
        names = [name for name in names if self.engine.can_reserve(name) and self.engine.room(name) > 0]
        counts = [min(size, self.engine.room(name)) for name, size in zip(names, sizes, strict=False)]
        self.engine.reserve(
            names,
            counts,
            num_drafts=[count - 1 if draft_all else 0 for count in counts],
            from_activations=from_activations and self.engine.skips,
            fractions=fractions[: len(names)] if reject else None,
            at_once=at_once,
        )

    @precondition(lambda self: self.engine.steps)
    @rule(sampled=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def commit(self, sampled: list[int]) -> None:
        self.engine.commit(sampled)

    @precondition(lambda self: set(self.running()) - set(self.loading()) and not self.engine.steps)
    @rule(
        index=st.integers(0, MAX_ROWS - 1),
        size=st.sampled_from([3, 4, 8, 24]),
        from_activations=st.booleans(),
        overlap=st.booleans(),
    )
    def prefill(self, index: int, size: int, from_activations: bool, overlap: bool) -> None:
        names = [name for name in self.running() if name not in self.loading()]
        self.compute(names[index % len(names)], size, from_activations, overlap)

    def compute(self, name: str, size: int, from_activations: bool, overlap: bool) -> None:
        """A request's whole prompt, alone, one or two chunks in flight, with a checkpoint wherever one can be taken."""
        engine = self.engine
        request = engine.requests[name]
        while (left := len(request.prompt) - engine.max_model_len + engine.room(name)) > 0 or engine.steps:
            in_flight = len(engine.steps)
            if left > 0 and in_flight < (1 + overlap) and in_flight < engine.max_steps and engine.can_reserve(name):
                chunk = min(size, left)
                if engine.reserve([name], [chunk], from_activations=from_activations and engine.skips):
                    continue
                if not engine.steps:
                    break
            engine.commit()
            if engine.has_states and engine.can_checkpoint(name):
                engine.checkpoint(name)

    @precondition(lambda self: self.running())
    @rule(index=st.integers(0, MAX_ROWS - 1))
    def preempt(self, index: int) -> None:
        self.engine.preempt(self.running()[index % len(self.running())])

    @precondition(lambda self: len(self.running()) < len(self.engine.requests))
    @rule(index=st.integers(0, MAX_ROWS - 1))
    def resume(self, index: int) -> None:
        waiting = [name for name, request in self.engine.requests.items() if not request.running]
        self.engine.resume(waiting[index % len(waiting)])

    @precondition(lambda self: self.engine.requests)
    @rule(index=st.integers(0, MAX_ROWS - 1))
    def release(self, index: int) -> None:
        names = list(self.engine.requests)
        self.engine.release(names[index % len(names)])

    @precondition(lambda self: self.engine.has_states and self.checkpointable())
    @rule(index=st.integers(0, MAX_ROWS - 1))
    def checkpoint(self, index: int) -> None:
        names = self.checkpointable()
        self.engine.checkpoint(names[index % len(names)])

    def checkpointable(self) -> list[str]:
        return [name for name in self.running() if self.engine.can_checkpoint(name)]

    def loadable(self) -> list[str]:
        return [name for name in self.engine.requests if self.engine.load_lengths(name)]

    def loading(self) -> list[str]:
        return [name for name, request in self.engine.requests.items() if request.loading]

    @precondition(lambda self: self.loadable())
    @rule(index=st.integers(0, MAX_ROWS - 1), which=st.integers(0, 9))
    def start_load(self, index: int, which: int) -> None:
        names = self.loadable()
        name = names[index % len(names)]
        lengths = self.engine.load_lengths(name)
        self.engine.start_load(name, lengths[-1 - which % len(lengths)])

    @precondition(lambda self: self.loading())
    @rule(
        index=st.integers(0, MAX_ROWS - 1),
        fails=st.just([False]) | st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=6),
    )
    def end_load(self, index: int, fails: list[bool]) -> None:
        names = self.loading()
        self.engine.end_load(names[index % len(names)], fails)
        type(self).counts["loads"] += 1

    @precondition(lambda self: any(self.can_look_again(name) for name in self.running()))
    @rule(index=st.integers(0, MAX_ROWS - 1))
    def look_again(self, index: int) -> None:
        names = [name for name in self.running() if self.can_look_again(name)]
        self.engine.look_again(names[index % len(names)])

    @precondition(lambda self: self.running())
    @rule()
    def catch_up(self) -> None:
        self.engine.catch_up()

    def can_look_again(self, name: str) -> bool:
        """At rest, and nothing computed that would be lost."""
        return name in self.loading() or (self.engine.can_reserve(name) and self.engine.at_rest(name))

    def teardown(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is None:
            return
        cls = type(self)
        cls.operations += engine.operations
        cls.counts["hits"] += engine.hits
        cls.counts["exhausted"] += engine.exhausted
        cls.counts["runs"] += 1
