"""Memory by cause: the pool's bytes, recounted slot by slot after every operation of random traffic.

The recount shares nothing with `hma/accounting.py`: it walks every page, every block in it, every layer of the block
and every slot of the layer, finds who holds the block by reading the tables, and asks the masks of the papers
(`layouts.sees`) whether the next query reads the slot.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvtide.hma import HybridMemoryManager, MemoryByCause
from kvtide.hma.accounting import account_active
from kvtide.kvcache import ConfigError, CrossAttention, Exhausted, FullAttention, ModelLayout, SlidingWindow
from kvtide.kvcache.baselines import grouped_geometry, lcm_geometry, uniform_geometry
from kvtide.kvcache.geometry import BlockFormat, PageGeometry
from kvtide.kvcache.specs import Component, RecurrentState

sys.path.insert(0, str(Path(__file__).parent))

from layouts import attention_specs, layout_of, sees, state_specs
from machine import geometries
from oracle import geometry_of

CAUSES = MemoryByCause._fields
MAX_LEN = 48
Holder = tuple[int, int]  # (row, logical block)


# -- the slow recount --------------------------------------------------------------------------------------------------


def holders_of(manager: HybridMemoryManager, rows: dict[int, Row]) -> dict[int, list[Holder]]:
    """Who holds which block, read from the tables entry by entry: block id -> (row, logical block)."""
    holders: dict[int, list[Holder]] = {}
    units_per_page = manager.geometry.page_bytes // manager.geometry.unit
    stride = max(fmt.blocks_per_page for fmt in manager.geometry.formats)
    for fmt in manager.geometry.formats:
        table = manager.tables[fmt.group.name]
        units_per_block = fmt.block_bytes // manager.geometry.unit
        for row in rows:
            first, end, sinks = int(table.first[row]), int(table.end[row]), table.sink_blocks
            for number in range(fmt.tables):
                for logical in [*range(min(sinks, end)), *range(first, end)]:
                    column = logical if logical < sinks else sinks + logical - first
                    entry = int(table.entries[number, row, column])
                    if entry >= 0:
                        page, unit = divmod(entry, units_per_page)
                        assert unit % units_per_block == 0
                        holders.setdefault(page * stride + unit // units_per_block, []).append((row, logical))
    return holders


def slot_cause(fmt: BlockFormat, position: int, row: Row, lookahead: int) -> str:
    """What one row says of the slot of a token."""
    spec = fmt.group.spec
    if isinstance(spec, CrossAttention):
        return "needed" if position < row.image_tokens else "block_tail"
    if position < row.committed:
        return "needed" if sees(spec, row.committed, position) else "out_of_window"
    if position < row.committed + row.in_flight:
        return "in_flight_reserve"
    if position < row.committed + row.in_flight + lookahead:
        return "draft_reserve"
    return "block_tail"


def recount(manager: HybridMemoryManager, rows: dict[int, Row], *, active_only: bool = False) -> dict[str, int]:
    """Bytes by cause, one slot at a time. `rows` are the running ones, as the traffic knows them."""
    geometry, pool = manager.geometry, manager.pool
    stride = max(fmt.blocks_per_page for fmt in geometry.formats)
    holders = holders_of(manager, rows)
    pins = Counter(manager.pinned_blocks().tolist())
    causes = Counter(dict.fromkeys(CAUSES, 0))
    for page in range(pool.num_pages):
        owner = int(pool.owner[page])
        if owner < 0:
            if not active_only:
                causes["free"] += geometry.page_bytes
            continue
        fmt = geometry.formats[owner]
        ids = range(page * stride, page * stride + fmt.blocks_per_page)
        if active_only and not any(pool.refs[block] for block in ids):
            continue
        causes["page_padding"] += fmt.page_bytes - fmt.blocks_per_page * fmt.block_bytes
        for block in ids:
            if not pool.refs[block]:
                causes["idle_cached" if pool.cached[block] else "free"] += fmt.block_bytes
            elif block not in holders:
                # Somebody else has it: a step in flight (of a row that left, or of one that starts from a checkpoint),
                # or nothing but pins.
                waits = int(pool.refs[block]) > pins[block]
                causes["in_flight_reserve" if waits else "idle_cached"] += fmt.block_bytes
            else:
                _count_held(causes, fmt, block, holders[block], rows, manager)
    return dict(causes)


def _count_held(
    causes: Counter[str],
    fmt: BlockFormat,
    block: int,
    held_by: list[Holder],
    rows: dict[int, Row],
    manager: HybridMemoryManager,
) -> None:
    precedence = ("needed", "out_of_window", "in_flight_reserve", "draft_reserve", "block_tail")
    table = _table_of(manager, fmt, block, held_by[0])
    for place in range(fmt.layers_per_block):
        if table * fmt.layers_per_block + place >= len(fmt.group.layers):
            causes["group_padding"] += fmt.layer_bytes
            continue
        used = 0
        for offset in range(max(fmt.block_size, 1)):
            if fmt.block_size:
                size = fmt.group.spec.bytes_per_token
                said = {
                    slot_cause(fmt, logical * fmt.block_size + offset, rows[row], manager.lookahead)
                    for row, logical in held_by
                }
            else:
                size = fmt.group.spec.state_bytes
                said = {"needed" if logical == 0 else "draft_reserve" for _, logical in held_by}
            causes[min(said, key=precedence.index)] += size
            used += size
        causes["page_padding"] += fmt.layer_bytes - used


def _table_of(manager: HybridMemoryManager, fmt: BlockFormat, block: int, holder: Holder) -> int:
    row, logical = holder
    table = manager.tables[fmt.group.name]
    column = logical if logical < table.sink_blocks else table.sink_blocks + logical - int(table.first[row])
    column_ids = table.to_ids(table.entries[:, row, column])
    return int(np.flatnonzero(column_ids == block)[0])


# -- traffic -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Row:
    """What the traffic knows of one request. `tokens` are those that the manager has seen."""

    row: int
    salt: str
    tokens: list[int]
    committed: int
    image_tokens: int
    running: bool = True
    in_flight: int = 0


@dataclass
class Member:
    row: Row
    count: int
    drafts: int


class Traffic:
    """Random requests on a manager; what each operation does follows from a few small numbers."""

    def __init__(self, geometry: PageGeometry, pages: int, *, skips: bool = False, **options: Any) -> None:
        self.manager = HybridMemoryManager(
            geometry, pages * geometry.page_bytes, max_requests=4, max_model_len=MAX_LEN, max_step_tokens=24, **options
        )
        self.has_states = any(not fmt.block_size for fmt in geometry.formats)
        self.skips = skips
        self.rows: list[Row] = []
        self.steps: list[list[Member]] = []
        self.pins: list[Any] = []
        self.next_name = 0
        self.seen: Counter[str] = Counter()

    @property
    def running(self) -> dict[int, Row]:
        return {row.row: row for row in self.rows if row.running}

    def admit(self, stem: int, length: int, salt: int) -> None:
        if len(self.rows) == 4:
            return
        prompt = self.prompt(stem, length)
        image = [0, 5, 17][salt % 3]
        self.next_name += 1
        space = f"s{salt // 3}"
        admission = self.manager.admit(
            f"r{self.next_name}", prompt, salt=space, image_tokens=image, priority=stem % 3 - 1
        )
        self.seen["hits"] += admission.num_cached_tokens > 0
        self.rows.append(Row(admission.row, space, prompt, admission.num_cached_tokens, image))

    @staticmethod
    def prompt(stem: int, length: int) -> list[int]:
        """Prompts of one stem share everything, those of others part in the middle."""
        return [p % 5 if p < 20 else stem for p in range(40 - length)]

    def reserve(self, first: int, size: int, draft: int) -> None:
        if len(self.steps) == self.manager.max_steps_in_flight:
            return self.commit(size, draft, 0)
        members = []
        for i, row in enumerate(self.running.values()):
            room = MAX_LEN - row.committed - row.in_flight
            blocked = self.has_states and self.manager.lookahead and row.in_flight
            if room > 0 and not blocked and (i + first) % 3:
                count = min([1, 2, 5, 9, 16, 24][(size + i) % 6], room)
                drafts = min(draft % 4, count - 1, self.manager.lookahead)
                if self.has_states and count > 1 + self.manager.lookahead:
                    drafts = 0
                members.append(Member(row, count, drafts))
        try:
            self.manager.reserve(
                [m.row.row for m in members],
                [m.count for m in members],
                num_drafts=[m.drafts for m in members],
                kv_from_activations=self.skips and first % 2 == 0,
            )
        except Exhausted:
            self.seen["exhausted"] += 1
            return None
        for member in members:
            member.row.in_flight += member.count
        self.steps.append(members)
        return None

    def commit(self, sampled: int, reject: int, _: int) -> None:
        if not self.steps:
            return
        members = [m for m in self.steps.pop(0) if m.row.running and m.row.in_flight]
        accepted = [m.count - min(m.drafts, reject % 4) for m in members]
        tokens: list[int] = []
        for member, count in zip(members, accepted, strict=True):
            row = member.row
            unseen = max(row.committed + count - len(row.tokens), 0)
            row.tokens += [sampled % 2] * unseen
            tokens += [sampled % 2] * unseen
            row.committed += count
            row.in_flight -= member.count
        self.manager.commit([m.row.row for m in members], accepted, tokens)

    def preempt_or_resume(self, index: int, *_: int) -> None:
        if not self.rows:
            return
        row = self.rows[index % len(self.rows)]
        if row.running:
            self.manager.preempt(row.row)
            self._left(row)
            row.running, row.committed, row.in_flight = False, 0, 0
        else:
            row.committed = self.manager.resume(row.row).num_cached_tokens
            row.running = True

    def release(self, index: int, *_: int) -> None:
        if self.rows:
            row = self.rows.pop(index % len(self.rows))
            self.manager.release(row.row)
            self._left(row)
            row.running = False

    def _left(self, row: Row) -> None:
        # A resumed row must not be taken for the one that left.
        self.seen["left in flight"] += row.in_flight > 0
        self.steps = [[m for m in members if m.row is not row] for members in self.steps]

    def checkpoint(self, index: int, *_: int) -> None:
        for row in self.running.values():
            if row.committed and row.committed % self.manager.base == 0 and not row.in_flight:
                self.seen["checkpoints"] += len(self.manager.checkpoint(row.row))

    def pin(self, stem: int, length: int, salt: int) -> None:
        if len(self.pins) > 2:
            return self.unpin(stem)
        pin = self.manager.pin(self.prompt(stem, length), salt=f"s{salt // 3}")
        self.seen["pins"] += pin.num_tokens > 0
        self.pins.append(pin)
        return None

    def unpin(self, index: int, *_: int) -> None:
        if self.pins:
            self.manager.unpin(self.pins.pop(index % len(self.pins)))

    def compare(self) -> None:
        manager = self.manager
        stats = manager.stats()
        expected = recount(manager, self.running)
        assert stats._asdict() == expected
        assert min(stats) >= 0
        if all(fmt.page_bytes == manager.geometry.page_bytes for fmt in manager.geometry.formats):
            assert sum(stats) == manager.pool.num_pages * manager.geometry.page_bytes
        active = account_active(manager)
        assert active._asdict() == recount(manager, self.running, active_only=True)
        for cause in CAUSES:
            self.seen[cause] += expected[cause] > 0


OPERATIONS: dict[str, Callable[..., None]] = {
    name: getattr(Traffic, name)
    for name in ("admit", "reserve", "commit", "preempt_or_resume", "release", "checkpoint", "pin", "unpin")
}
WEIGHTED = ["reserve"] * 6 + ["admit"] * 4 + ["commit"] * 4 + ["release"] * 2 + [*OPERATIONS]
small = st.integers(0, 5)
operations = st.lists(st.tuples(st.sampled_from(WEIGHTED), small, st.integers(0, 39), small), min_size=25, max_size=50)


@st.composite
def baseline_geometries(draw: st.DrawFn, plan: Callable[[ModelLayout, int], PageGeometry]) -> PageGeometry:
    """Equal groups with padding layers, LCM pages, and one table cut into a page per group as the replay does."""
    specs = draw(st.lists(attention_specs(st.integers(1, 12)) | state_specs(2, 2), min_size=2, max_size=3, unique=True))
    if all(spec.per_image for spec in specs):
        specs.append(FullAttention(1, 2, 2))
    layout = layout_of("random", *[(draw(st.sampled_from([2, 3, 5, 1])), spec) for spec in specs])
    geometry = plan(layout, draw(st.sampled_from([2, 4, 8])))
    if geometry.one_table:
        geometry = replace(geometry, one_table=False)
    assume(max(fmt.blocks_per_page for fmt in geometry.formats) <= 24)
    assume(max(fmt.block_size for fmt in geometry.formats) <= 64)
    assume(not (layout.has_cross_attention and any(fmt.keeps_all for fmt in geometry.formats)))
    return geometry


def run(geometry: PageGeometry, traffic: list[tuple[str, int, int, int]], total: Counter[str], **options: Any) -> None:
    try:
        machine = Traffic(geometry, **options)
    except ConfigError:
        assume(False)
    machine.compare()
    for name, *numbers in traffic:
        OPERATIONS[name](machine, *numbers)
        machine.compare()
    machine.manager.check()
    total.update(machine.seen)


OPTIONS: dict[str, Any] = {
    "pages": st.sampled_from([60, 30, 100, 12, 6]),
    "lookahead": st.sampled_from([0, 0, 1, 3]),
    "max_steps_in_flight": st.sampled_from([1, 2]),
    "drop_last_block": st.sampled_from([False, False, True]),
    "skips": st.booleans(),
}
QUIET = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def test_every_byte_has_its_cause() -> None:
    total: Counter[str] = Counter()

    @QUIET
    @given(geometry=geometries(), traffic=operations, options=st.fixed_dictionaries(OPTIONS))
    def check(geometry: PageGeometry, traffic: list[tuple[str, int, int, int]], options: dict[str, Any]) -> None:
        run(geometry, traffic, total, **options)

    check()
    assert set(CAUSES) - {"group_padding"} <= {cause for cause in CAUSES if total[cause]}
    assert min(total[kind] for kind in ("hits", "exhausted", "left in flight", "pins")) > 0, total


@pytest.mark.parametrize("plan", [grouped_geometry, lcm_geometry, uniform_geometry])
def test_every_byte_of_the_baselines_has_its_cause(plan: Callable[[ModelLayout, int], PageGeometry]) -> None:
    total: Counter[str] = Counter()

    @settings(QUIET, max_examples=settings().max_examples // 2)
    @given(geometry=baseline_geometries(plan), traffic=operations, options=st.fixed_dictionaries(OPTIONS))
    def check(geometry: PageGeometry, traffic: list[tuple[str, int, int, int]], options: dict[str, Any]) -> None:
        run(geometry, traffic, total, **options)

    check()
    assert min(total[kind] for kind in ("hits", "left in flight", "pins")) > 0, total
    assert total["group_padding"] or plan is not grouped_geometry
    assert total["out_of_window"] or plan is not uniform_geometry


# -- by hand -----------------------------------------------------------------------------------------------------------

FULL = FullAttention(1, 1, 1)  # 4 bytes per token and layer
WINDOW = SlidingWindow(1, 1, 1, window=4)


def by_hand(
    layout: ModelLayout, pages: int, tables: dict[str, int] | None = None, **options: Any
) -> HybridMemoryManager:
    """Blocks of 4 tokens, as large pages as the largest block."""
    names = [group.name for group in layout.groups]
    geometry = geometry_of(layout, dict.fromkeys(names, 4), {name: (tables or {}).get(name, 1) for name in names})
    return HybridMemoryManager(geometry, pages * geometry.page_bytes, max_requests=4, max_model_len=64, **options)


def memory(**causes: int) -> MemoryByCause:
    return MemoryByCause(**{**dict.fromkeys(CAUSES, 0), **causes})


def step(manager: HybridMemoryManager, row: int, count: int, tokens: list[int] | None = None, **options: Any) -> None:
    manager.reserve([row], [count], **options)
    manager.commit([row], [count], tokens)


def test_an_empty_pool_is_free_and_an_admitted_row_holds_nothing() -> None:
    manager = by_hand(layout_of("one", (1, FULL)), 8)
    assert manager.stats() == memory(free=8 * 16)
    manager.admit("a", [1, 2, 3])
    assert manager.stats() == memory(free=8 * 16)
    assert account_active(manager) == memory()


def test_a_row_with_a_step_in_flight_by_hand() -> None:
    """One full layer and one window of 4, blocks of 4, 2 draft slots; 6 tokens committed, 3 in flight."""
    manager = by_hand(layout_of("two", (1, FULL), (1, WINDOW)), 10, lookahead=2)
    row = manager.admit("a", list(range(9))).row
    manager.reserve([row], [6])
    assert manager.stats() == memory(in_flight_reserve=2 * 24, draft_reserve=2 * 8, free=6 * 16)
    manager.commit([row], [6])
    # The query at 6 sees tokens 3 to 6 in the window: 0 to 2 are out, in a block that is held for token 3.
    held = memory(needed=24 + 12, out_of_window=12, draft_reserve=16)
    assert account_active(manager) == held
    manager.reserve([row], [3])
    # 6 + 3 + 2 slots: block 2 comes in both layers, with its last slot empty.
    held = memory(needed=24 + 12, out_of_window=12, in_flight_reserve=24, draft_reserve=16, block_tail=8)
    assert account_active(manager) == held
    assert manager.stats() == held._replace(free=4 * 16)
    manager.release(row)
    # Block 0 of both layers is cached; the rest waits for the step that may still write to it.
    waiting = memory(in_flight_reserve=6 * 16)
    assert account_active(manager) == waiting
    manager.commit([], [])
    assert account_active(manager) == memory()
    assert manager.stats() == memory(idle_cached=2 * 16, free=8 * 16)


def test_dead_on_arrival_tokens_take_nothing() -> None:
    manager = by_hand(layout_of("two", (1, FULL), (1, WINDOW)), 30)
    row = manager.admit("a", list(range(50))).row
    manager.reserve([row], [40], kv_from_activations=True)
    # Once the step is done the window needs tokens 37 to 39, in block 9.
    assert account_active(manager) == memory(in_flight_reserve=10 * 16 + 16)
    manager.commit([row], [40])
    assert account_active(manager) == memory(needed=160 + 12, out_of_window=4)


def test_padding_layers_and_inner_padding_by_hand() -> None:
    """4 full and 3 wider window layers in groups of 4: one padding layer, and full slots that are half padding."""
    wide = SlidingWindow(1, 2, 2, window=64)
    layout = layout_of("padded", (4, FullAttention(1, 1, 2)), (3, wide))
    geometry = grouped_geometry(layout, 4)
    assert geometry.page_bytes == 4 * 32
    manager = HybridMemoryManager(geometry, 8 * 128, max_requests=2, max_model_len=64)
    row = manager.admit("a", list(range(5))).row
    step(manager, row, 4)
    # A full layer's 24 bytes lie in 32; the fourth window layer is empty.
    assert account_active(manager) == memory(needed=4 * 24 + 3 * 32, page_padding=4 * 8, group_padding=32)
    manager.release(row)
    assert manager.stats() == memory(idle_cached=2 * 128, free=6 * 128)


def test_states_by_hand() -> None:
    """A state per row, one more per draft slot; a checkpoint is cached, and held while a row starts from it."""
    state = RecurrentState((Component("s", (4,), "float32"),))
    manager = by_hand(layout_of("states", (1, FULL), (1, state)), 12, lookahead=1)
    row = manager.admit("a", list(range(6))).row
    step(manager, row, 4)
    assert account_active(manager) == memory(needed=16 + 16, draft_reserve=4 + 16, block_tail=12)
    assert manager.checkpoint(row)
    assert manager.stats() == memory(
        needed=16 + 16, draft_reserve=4 + 16, block_tail=12, idle_cached=16, free=(12 - 5) * 16
    )
    manager.release(row)
    row = manager.admit("b", list(range(6))).row
    assert manager.committed[row] == 4
    assert account_active(manager) == memory(needed=16, in_flight_reserve=16)
    manager.reserve([row], [2])
    assert account_active(manager) == memory(
        needed=16 + 16, in_flight_reserve=16 + 8, draft_reserve=4 + 16, block_tail=4
    )
    manager.commit([row], [2])
    assert account_active(manager) == memory(needed=24 + 16, draft_reserve=4 + 16, block_tail=4)


def test_shared_blocks_count_once_and_pins_are_idle() -> None:
    manager = by_hand(layout_of("two", (1, FULL), (1, WINDOW)), 12)
    first = manager.admit("a", list(range(9))).row
    step(manager, first, 8)
    second = manager.admit("b", [*range(8), 99]).row
    assert manager.committed[second] == 8
    # Tokens 5 to 7 are in the window's block 1, once.
    assert account_active(manager) == memory(needed=32 + 12, out_of_window=4)
    pin = manager.pin(range(8))
    assert account_active(manager) == memory(needed=32 + 12, out_of_window=4)
    manager.release(first)
    manager.release(second)
    assert account_active(manager) == memory(idle_cached=3 * 16)
    assert manager.stats() == memory(idle_cached=4 * 16, free=8 * 16)
    manager.unpin(pin)
    assert account_active(manager) == memory()
    assert manager.stats() == memory(idle_cached=4 * 16, free=8 * 16)


def test_a_pinned_block_that_waits_for_a_step_is_in_flight() -> None:
    manager = by_hand(layout_of("one", (1, FULL)), 8)
    row = manager.admit("a", list(range(9))).row
    step(manager, row, 4)
    manager.pin(range(4))
    manager.reserve([row], [4])
    manager.release(row)
    assert account_active(manager) == memory(in_flight_reserve=2 * 16)
    manager.commit([], [])
    assert account_active(manager) == memory(idle_cached=16)


def test_rows_can_share_a_block_of_one_table_alone() -> None:
    """Two full layers in a table each. The first table's cached block is evicted, the second's is not."""
    manager = by_hand(layout_of("split", (2, FULL), (1, WINDOW)), 5, {"full_attention": 2})
    step(manager, (row := manager.admit("a", range(4)).row), 4)
    manager.release(row)
    assert manager.stats() == memory(idle_cached=3 * 16, free=2 * 16)
    step(manager, (row := manager.admit("b", [9, 9, 9]).row), 3)
    manager.release(row)
    assert manager.stats() == memory(idle_cached=2 * 16, free=3 * 16)
    third = manager.admit("c", range(5)).row
    step(manager, third, 4)
    fourth = manager.admit("d", range(5)).row
    assert manager.committed[fourth] == 4
    full, window = manager.tables["full_attention"].entries, manager.tables["sliding_window"].entries
    assert full[0, third, 0] == full[0, fourth, 0]
    assert full[1, third, 0] != full[1, fourth, 0]
    assert window[0, third, 0] != window[0, fourth, 0]
    assert manager.stats() == memory(needed=3 * 16 + 2 * 12, out_of_window=2 * 4)
