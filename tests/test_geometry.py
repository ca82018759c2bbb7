"""Page geometry against a table of blocks filled token by token, and the solver against trying every page.

The oracle (`Filled`) appends one token after the other, marks every slot, drops a block when no later query can see it,
and puts what is left into pages, one block at a time. Nothing in it divides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from math import gcd

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layouts import (
    attention_specs,
    deepseek_v3_2,
    gemma_3_4b,
    gemma_3_12b,
    gemma_3_27b,
    layout_of,
    mimo_v2_flash,
    mllama_11b,
    qwen_3_5_27b,
    sees,
    state_specs,
    step_3_5,
)

from kvtide.kvcache import (
    MLA,
    ChunkedLocal,
    Component,
    ConfigError,
    CrossAttention,
    FullAttention,
    Group,
    LayerSpec,
    ModelLayout,
    RecurrentState,
    SinkWindow,
    SlidingWindow,
)
from kvtide.kvcache.geometry import BlockFormat, Charge, PageGeometry, block_sizes
from kvtide.kvcache.solver import (
    MAX_PAGE_BYTES,
    REFERENCE_IMAGE_TOKENS,
    REFERENCE_TOKENS,
    TABLE_COST,
    solve_geometry,
)

MODELS = [
    gemma_3_4b(),
    gemma_3_12b(),
    gemma_3_27b(),
    mimo_v2_flash(),
    step_3_5(),
    qwen_3_5_27b(),
    mllama_11b(),
    deepseek_v3_2("fp8_ds_mla"),
]


@dataclass
class Filled:
    """One block table of a format, filled token by token: logical block -> the tokens in its slots."""

    fmt: BlockFormat
    own: int = 0
    stored: int = 0
    blocks: dict[int, list[int]] = field(default_factory=dict)
    peak: int = 0

    def append(self, *, own: bool = True) -> None:
        """Store one more token (for a baseline that stores foreign tokens, `own=False` is one of those)."""
        token = self.stored
        self.stored += 1
        self.own += own
        number = 0
        left = token
        while self.fmt.block_size and left >= self.fmt.block_size:
            number += 1
            left -= self.fmt.block_size
        self.blocks.setdefault(number, []).append(token)
        if not self.fmt.keeps_all and self.fmt.block_size:
            for key in list(self.blocks):
                if not any(self.is_needed(token) for token in self.blocks[key]):
                    assert key != number, "the newest block is always in reach"
                    del self.blocks[key]
        self.peak = max(self.peak, len(self.blocks))

    def is_needed(self, token: int) -> bool:
        return sees(self.fmt.group.spec, self.own - 1, token)

    def charge(self) -> dict[str, int]:
        """Bytes by cause, counted slot by slot, layer by layer, page by page."""
        fmt = self.fmt
        causes = dict.fromkeys(Charge._fields, 0)
        real = len(fmt.group.layers)
        token_bytes = fmt.group.spec.bytes_per_token
        pages: list[int] = []  # bytes left in each
        position = 0
        for _ in range(fmt.tables):
            for layer in range(position, position + fmt.layers_per_block):
                for tokens in self.blocks.values():
                    if layer >= real:
                        causes["group_padding"] += fmt.layer_bytes
                        continue
                    used = fmt.group.spec.state_bytes if not fmt.block_size else 0
                    causes["needed"] += used
                    for slot in range(fmt.block_size):
                        if slot >= len(tokens):
                            cause = "block_tail"
                        else:
                            cause = "needed" if self.is_needed(tokens[slot]) else "out_of_window"
                        causes[cause] += token_bytes
                        used += token_bytes
                    causes["page_padding"] += fmt.layer_bytes - used
            position += fmt.layers_per_block
            for _ in self.blocks:
                if not pages or pages[-1] < fmt.block_bytes:
                    pages.append(fmt.page_bytes)
                pages[-1] -= fmt.block_bytes
        for left in pages[:-1]:
            causes["page_padding"] += left
        if pages:
            left = pages[-1]
            while left >= fmt.block_bytes:
                causes["free"] += fmt.block_bytes
                left -= fmt.block_bytes
            causes["page_padding"] += left
        assert sum(causes.values()) == len(pages) * fmt.page_bytes
        return causes


@st.composite
def formats(draw: st.DrawFn, *, baseline: bool = False) -> BlockFormat:
    """Any format that is legal, with padding of every sort; `baseline` also gives those that keep all tokens."""
    spec = draw(st.one_of(attention_specs(st.integers(1, 20)), state_specs()))
    real = draw(st.integers(1, 7))
    padding = draw(st.integers(0, 3))
    tables = draw(st.sampled_from([t for t in range(1, real + padding + 1) if (real + padding) % t == 0]))
    block_size = 0 if spec.state_bytes else draw(st.integers(1, 9))
    layer_bytes = (spec.state_bytes or spec.bytes_per_token * block_size) + draw(st.sampled_from([0, 0, 1, 16]))
    block = (real + padding) // tables * layer_bytes
    page = block * draw(st.integers(1, 9)) + draw(st.sampled_from([0, 0, 1, block - 1]))
    group = Group(f"{spec.kind}", spec, tuple(range(real)))
    keeps_all = baseline and draw(st.booleans())
    return BlockFormat(group, block_size, tables, layer_bytes, page, padding, keeps_all)


def fields_at(charge: Charge, index: int) -> dict[str, int]:
    return {name: int(values[index]) for name, values in charge._asdict().items()}


class TestCharge:
    @given(fmt=formats(baseline=True), most=st.integers(0, 45))
    def test_every_cause_at_every_length(self, fmt: BlockFormat, most: int) -> None:
        lengths = np.arange(most + 1)
        charge = fmt.charge(lengths, lengths)
        blocks = fmt.live_blocks(lengths, lengths)
        filled = Filled(fmt)
        for n in range(most + 1):
            assert blocks[n] == len(filled.blocks)
            assert fields_at(charge, n) == filled.charge()
            assert charge.allocated[n] == sum(filled.charge().values())
            assert fmt.peak_blocks(n, n) == filled.peak
            filled.append()

    @given(fmt=formats(baseline=True), own=st.integers(0, 30), foreign=st.integers(0, 30))
    def test_a_baseline_that_stores_foreign_tokens(self, fmt: BlockFormat, own: int, foreign: int) -> None:
        """Text in cross-attention layers, images in the others: stored, and needed by nobody."""
        if not fmt.keeps_all or fmt.group.spec.state_bytes:
            foreign = 0
        filled = Filled(fmt)
        for _ in range(own):
            filled.append()
        for _ in range(foreign):
            filled.append(own=False)
        charge = fmt.charge(np.array([own]), np.array([own + foreign]))
        assert fields_at(charge, 0) == filled.charge()
        assert fmt.peak_blocks(own, own + foreign) == filled.peak

    @given(fmt=formats(), lengths=st.lists(st.integers(0, 400), min_size=1, max_size=8))
    def test_numbers_and_arrays_agree(self, fmt: BlockFormat, lengths: list[int]) -> None:
        table = fmt.charge(np.array(lengths), np.array(lengths))
        for i, n in enumerate(lengths):
            assert fields_at(fmt.charge(np.array([n]), np.array([n])), 0) == fields_at(table, i)

    @given(fmt=formats(baseline=True), n=st.integers(0, 10**9))
    def test_long_sequences_add_up(self, fmt: BlockFormat, n: int) -> None:
        charge = fmt.charge(np.array([n]), np.array([n]))
        assert all((part >= 0).all() for part in charge)
        blocks = int(fmt.live_blocks(np.array([n]), np.array([n]))[0])
        pages = -(-blocks * fmt.tables // fmt.blocks_per_page)
        assert charge.allocated[0] == pages * fmt.page_bytes
        assert fmt.peak_blocks(n, n) >= blocks


class TestPeak:
    @given(
        spec=attention_specs(st.integers(1, 40)),
        block_size=st.integers(1, 24),
        most=st.integers(0, 300),
    )
    def test_is_the_largest_count_at_any_length(self, spec: LayerSpec, block_size: int, most: int) -> None:
        layer = spec.bytes_per_token * block_size
        fmt = BlockFormat(Group("g", spec, (0,)), block_size, 1, layer, layer)
        lengths = np.arange(most + 1)
        counts = fmt.live_blocks(lengths, lengths)
        assert [fmt.peak_blocks(n, n) for n in range(most + 1)] == np.maximum.accumulate(counts).tolist()

    @pytest.mark.parametrize(
        ("spec", "block_size", "tokens", "expected"),
        [
            (FullAttention(1, 1, 1), 16, 8193, 513),
            (SlidingWindow(1, 1, 1, window=1024), 16, 131072, 65),  # the window straddles one more block
            (SlidingWindow(1, 1, 1, window=1025), 16, 131072, 65),
            (SlidingWindow(1, 1, 1, window=1026), 16, 131072, 66),
            (SlidingWindow(1, 1, 1, window=1024), 16, 1024, 64),
            (SlidingWindow(1, 1, 1, window=128), 16, 131072, 9),
            (SinkWindow(1, 1, 1, window=1024, sinks=4), 16, 131072, 66),
            (ChunkedLocal(1, 1, 1, chunk=8192), 16, 131072, 512),
            (ChunkedLocal(1, 1, 1, chunk=102), 16, 131072, 8),  # a chunk that starts in slot 14 touches 8 blocks
            (ChunkedLocal(1, 1, 1, chunk=102), 16, 102, 7),
            (ChunkedLocal(1, 1, 1, chunk=100), 16, 131072, 7),  # chunks start in slots 0, 4, 8 and 12 only
            (RecurrentState((Component("s", (4,), "float32"),)), 0, 131072, 1),
            (RecurrentState((Component("s", (4,), "float32"),)), 0, 0, 0),
        ],
    )
    def test_known_values(self, spec: LayerSpec, block_size: int, tokens: int, expected: int) -> None:
        layer = spec.state_bytes or spec.bytes_per_token * block_size
        fmt = BlockFormat(Group("g", spec, (0,)), block_size, 1, layer, layer)
        assert fmt.peak_blocks(tokens, tokens) == expected


class TestFormat:
    def test_uneven_split(self) -> None:
        with pytest.raises(ConfigError, match=r"^10 layers \(and 1 of padding\) of group g cannot be split evenly"):
            BlockFormat(Group("g", FullAttention(1, 1, 1), tuple(range(10))), 1, 2, 4, 1000, padding_layers=1)

    def test_page_too_small(self) -> None:
        with pytest.raises(ConfigError, match="a page of 39 bytes cannot hold a 40-byte block of g"):
            BlockFormat(Group("g", FullAttention(1, 1, 1), tuple(range(10))), 1, 1, 4, 39)

    @given(fmt=formats())
    def test_every_layer_has_a_place_of_its_own(self, fmt: BlockFormat) -> None:
        places = [fmt.place(layer) for layer in fmt.group.layers]
        assert len(set(places)) == len(places)
        assert places == sorted(places)
        for table, offset in places:
            assert 0 <= table < fmt.tables
            assert offset % fmt.layer_bytes == 0
            assert offset + fmt.layer_bytes <= fmt.block_bytes
        assert fmt.block_bytes * fmt.blocks_per_page + fmt.page_tail_bytes == fmt.page_bytes
        assert 0 <= fmt.page_tail_bytes < fmt.block_bytes

    @given(fmt=formats())
    def test_components_follow_each_other(self, fmt: BlockFormat) -> None:
        end = 0
        for part in fmt.group.spec.components():
            assert fmt.component_offset(part.name) == end
            end += part.num_bytes * (fmt.block_size or 1)
        assert end <= fmt.layer_bytes

    def test_arrays_of_a_state_follow_each_other(self) -> None:
        states = solve_geometry(qwen_3_5_27b()).formats[0]
        assert (states.component_offset("conv"), states.component_offset("ssm")) == (0, 61440)
        assert (states.place(0), states.place(1), states.place(2)) == ((0, 0), (0, 3207168), (1, 0))

    def test_unknown_layers_and_components(self) -> None:
        fmt = solve_geometry(gemma_3_27b()).formats[0]
        with pytest.raises(ConfigError, match="layer 11 is not in group full_attention"):
            fmt.place(11)
        with pytest.raises(ConfigError, match=r"has no component 'latent'; it has \['k', 'v'\]"):
            fmt.component_offset("latent")


def _geometry(page_bytes: int, *formats: BlockFormat) -> PageGeometry:
    runs = ((len(fmt.group.layers), fmt.group.spec) for fmt in formats)
    return PageGeometry("test", layout_of("test", *runs), page_bytes, formats)


class TestPageGeometry:
    def test_int32_limit(self) -> None:
        geometry = solve_geometry(gemma_3_27b())
        assert geometry.max_arena_bytes == 2**31 * geometry.unit
        geometry.check_arena(geometry.max_arena_bytes)
        # The last entry of the largest arena is the largest int32.
        assert geometry.max_arena_bytes // geometry.unit - 1 == np.iinfo(np.int32).max
        with pytest.raises(ConfigError, match=rf"more than 2\*\*31 units of {geometry.unit} bytes; at most"):
            geometry.check_arena(geometry.max_arena_bytes + 1)

    def test_the_unit_divides_pages_and_blocks(self) -> None:
        group = Group("g", FullAttention(1, 1, 1), (0, 1))
        assert _geometry(100, BlockFormat(group, 10, 1, 20, 100)).unit == 20  # two blocks of 40 and a tail of 20
        assert _geometry(120, BlockFormat(group, 5, 1, 20, 120), BlockFormat(group, 15, 1, 60, 120)).unit == 40

    def test_format_of(self) -> None:
        geometry = solve_geometry(gemma_3_27b())
        assert geometry.format_of(9).group.name == "full_attention"
        assert geometry.format_of(10).group.name == "sliding_window"
        with pytest.raises(ConfigError, match="layer 62 of gemma-3-27b stores no KV of its own"):
            geometry.format_of(62)

    def test_images_join_the_text_unless_layers_keep_them(self) -> None:
        together = solve_geometry(gemma_3_27b())
        charge = together.charge(1000, 256)
        assert charge["full_attention"].needed == 1256 * 81920
        assert charge["sliding_window"].needed == 1024 * 52 * 8192
        apart = solve_geometry(mllama_11b())
        charge = apart.charge(43, 6193)
        assert charge["full_attention"].needed == 43 * 32 * 4096
        assert charge["cross_attention"].needed == 6193 * 8 * 4096

    def test_charges_broadcast(self) -> None:
        geometry = solve_geometry(mllama_11b())
        table = geometry.charge(np.array([[1], [100]]), np.array([7, 1601, 6404]))
        assert table["full_attention"].needed.shape == np.broadcast_shapes((2, 1), table["full_attention"].free.shape)
        assert table["cross_attention"].needed.ravel().tolist() == [n * 8 * 4096 for n in (7, 1601, 6404)]

    @given(fmt=formats(), lengths=st.lists(st.integers(0, 2000), min_size=1, max_size=5))
    def test_slack_bounds_what_pages_hold_beyond_blocks(self, fmt: BlockFormat, lengths: list[int]) -> None:
        """Tails of pages are not slack: no block can ever use them, and every page has one."""
        geometry = _geometry(fmt.page_bytes, fmt)
        tokens = np.array(lengths)
        blocks = fmt.live_blocks(tokens, tokens) * fmt.tables
        charge = fmt.charge(tokens, tokens)
        tails = charge.allocated // fmt.page_bytes * fmt.page_tail_bytes
        beyond = charge.allocated - tails - blocks * fmt.block_bytes
        assert (beyond <= geometry.slack_bytes).all()
        assert (charge.free == beyond).all()

    @given(fmt=formats())
    def test_slack_is_reached_up_to_one_step_of_the_tables(self, fmt: BlockFormat) -> None:
        """Blocks come `tables` at a time, so a last page with one block needs a block count one above a multiple."""
        assume(not fmt.group.spec.state_bytes and not fmt.group.spec.has_bounded_reach)
        tokens = np.arange(1, fmt.block_size * fmt.blocks_per_page + 1)
        free = int(fmt.charge(tokens, tokens).free.max())
        step = gcd(fmt.tables, fmt.blocks_per_page)
        assert free == _geometry(fmt.page_bytes, fmt).slack_bytes - (step - 1) * fmt.block_bytes

    def test_pinned_fraction(self) -> None:
        spec = FullAttention(1, 1, 1)
        group = Group("g", spec, (0, 1))
        assert _geometry(80, BlockFormat(group, 5, 1, 20, 80)).pinned_fraction == 0.5
        assert _geometry(80, BlockFormat(group, 5, 1, 20, 80), BlockFormat(group, 5, 2, 20, 80)).pinned_fraction == 0.75
        assert _geometry(40, BlockFormat(group, 5, 1, 20, 40)).pinned_fraction == 0.0


class TestBlockSizes:
    def test_one_for_all_and_by_name(self) -> None:
        assert block_sizes(qwen_3_5_27b(), 32) == {"recurrent_state": 0, "full_attention": 32}
        assert block_sizes(gemma_3_27b(), {"sliding_window": 8}) == {"full_attention": 16, "sliding_window": 8}

    def test_unknown_groups(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown groups \['window'\]; gemma-3-27b has \['full_attention', "):
            block_sizes(gemma_3_27b(), {"window": 8})

    @pytest.mark.parametrize("bad", [0, -16, 2**20 + 1, 16.0, True, "16"])
    def test_bad_sizes(self, bad: int) -> None:
        with pytest.raises(ConfigError) as error:
            block_sizes(gemma_3_27b(), bad)
        assert f"block_size {bad!r} of group full_attention" in str(error.value)
        with pytest.raises(ConfigError, match="of group sliding_window must be"):
            block_sizes(gemma_3_27b(), {"sliding_window": bad})


# --- the solver ------------------------------------------------------------------------------------------------------


@cache
def count_live(spec: LayerSpec, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Live blocks and needed tokens (states: one of each) at the reference lengths, from masks over all tokens."""
    blocks, needed = [], []
    for n in REFERENCE_TOKENS.tolist():
        length = REFERENCE_IMAGE_TOKENS if spec.per_image else n
        if spec.state_bytes:
            blocks.append(1)
            needed.append(0)
            continue
        keys = np.arange(length)
        mask = np.ones(length, bool)
        if hasattr(spec, "window"):
            mask = length - 1 - keys < spec.window
        if hasattr(spec, "sinks"):
            mask |= keys < spec.sinks
        if hasattr(spec, "chunk"):
            mask = keys // spec.chunk == (length - 1) // spec.chunk
        seen = keys[mask]
        blocks.append(np.unique(seen // block_size).size)
        needed.append(seen.size)
    return np.array(blocks), np.array(needed)


def cost_of(group: Group, block_size: int, tables: int, pages: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Of one group cut one way: mean allocated bytes per page size (inf where no block fits), mean needed bytes, and
    what its tables cost."""
    spec = group.spec
    layer = spec.state_bytes or spec.bytes_per_token * block_size
    block = len(group.layers) // tables * layer
    blocks, needed = count_live(spec, block_size)
    fits = pages // block
    with np.errstate(divide="ignore"):
        held = np.ceil((blocks * tables)[:, None] / fits[None, :]) * pages[None, :]
    allocated = held.mean(axis=0)
    needed_bytes = needed.mean() * group.bytes_per_token + group.state_bytes
    return allocated, float(needed_bytes), 0.0 if spec.state_bytes else tables * TABLE_COST


def ways_to_cut(group: Group, block_size: int, min_block_size: int) -> list[tuple[int, int]]:
    sizes = [block_size]
    if hasattr(group.spec, "window") or hasattr(group.spec, "chunk"):
        sizes += [block_size // 2**i for i in range(1, 21) if block_size % 2**i == 0]
    sizes = [size for size in sizes if size >= min_block_size or size == block_size]
    count = len(group.layers)
    return [(size, tables) for size in sizes for tables in range(1, count + 1) if count % tables == 0]


def best_cost(layout: ModelLayout, pages: np.ndarray, block_size: int, min_block_size: int) -> float:
    """The least cost over all pages given, all splits, all block sizes."""
    total = np.zeros(len(pages))
    everything_needed = sum(cost_of(group, block_size, 1, pages)[1] for group in layout.groups)
    for group in layout.groups:
        options = []
        for size, tables in ways_to_cut(group, block_size, min_block_size):
            allocated, needed, table_cost = cost_of(group, size, tables, pages)
            options.append((allocated - needed) / everything_needed + table_cost)
        total += np.min(options, axis=0)
    return float(total.min())


def cost_of_geometry(geometry: PageGeometry) -> float:
    page = np.array([geometry.page_bytes])
    parts = [cost_of(fmt.group, fmt.block_size, fmt.tables, page) for fmt in geometry.formats]
    needed = sum(part[1] for part in parts)
    return float(sum((allocated[0] - need) / needed + table_cost for allocated, need, table_cost in parts))


def check_geometry(geometry: PageGeometry, bound: int) -> None:
    layer_parts = [fmt.layer_bytes for fmt in geometry.formats]
    assert geometry.page_bytes <= max(bound, *layer_parts)
    assert [fmt.group for fmt in geometry.formats] == list(geometry.layout.groups)
    for fmt in geometry.formats:
        assert fmt.page_bytes == geometry.page_bytes
        assert fmt.blocks_per_page * fmt.block_bytes <= geometry.page_bytes
        assert fmt.blocks_per_page >= 1
        assert fmt.block_bytes % geometry.unit == 0
        assert fmt.padding_layers == 0
        assert not fmt.keeps_all
        assert fmt.layer_bytes == (fmt.group.spec.state_bytes or fmt.group.spec.bytes_per_token * fmt.block_size)
        assert fmt.tables * fmt.layers_per_block == len(fmt.group.layers)
    assert geometry.page_bytes % geometry.unit == 0
    assert geometry.num_tables == sum(fmt.tables for fmt in geometry.formats)


@st.composite
def small_layouts(draw: st.DrawFn) -> ModelLayout:
    reach = st.sampled_from([1, 7, 8, 100, 128, 1000])
    specs = draw(st.lists(st.one_of(attention_specs(reach), state_specs(40, 12)), min_size=1, max_size=3, unique=True))
    return layout_of("small", *((draw(st.integers(1, 12)), spec) for spec in specs))


class TestSolver:
    def test_reference_lengths(self) -> None:
        assert REFERENCE_TOKENS[0] >= 2048
        assert REFERENCE_TOKENS[-1] <= 32769
        assert (REFERENCE_TOKENS % 2 == 1).all()

    @settings(max_examples=5 * settings().max_examples)
    @given(
        layout=small_layouts(),
        block_size=st.sampled_from([1, 3, 4, 8, 16]),
        min_block_size=st.sampled_from([1, 2, 8]),
        bound=st.integers(1, 6000),
    )
    def test_no_page_of_any_size_is_better(
        self, layout: ModelLayout, block_size: int, min_block_size: int, bound: int
    ) -> None:
        """Every whole number of bytes is tried as the page, so the candidates the solver skips are judged too."""
        geometry = solve_geometry(layout, block_size, min_block_size=min_block_size, max_page_bytes=bound)
        check_geometry(geometry, bound)
        for fmt in geometry.formats:
            assert (fmt.block_size, fmt.tables) in [
                (0 if fmt.group.spec.state_bytes else size, tables)
                for size, tables in ways_to_cut(fmt.group, block_size, min_block_size)
            ]
        smallest = [
            min(
                group.spec.state_bytes or group.spec.bytes_per_token * size
                for size, _ in ways_to_cut(group, block_size, min_block_size)
            )
            for group in layout.groups
        ]
        largest = max(bound, *smallest)
        # Past 512 blocks a page is not tried (documented); stay below that for the smallest block.
        largest = max(*smallest, min(largest, 512 * min(smallest)))
        pages = np.arange(max(smallest), largest + 1)
        assert cost_of_geometry(geometry) <= best_cost(layout, pages, block_size, min_block_size) + 1e-9

    @pytest.mark.parametrize("layout", MODELS, ids=lambda layout: layout.name)
    @pytest.mark.parametrize("min_block_size", [8, 16])
    def test_real_models(self, layout: ModelLayout, min_block_size: int) -> None:
        geometry = solve_geometry(layout, min_block_size=min_block_size)
        check_geometry(geometry, MAX_PAGE_BYTES)
        layers = [
            group.spec.state_bytes or group.spec.bytes_per_token * size
            for group in layout.groups
            for size, _ in ways_to_cut(group, 16, min_block_size)
        ]
        step = gcd(*layers)  # a page between two multiples holds what the lower one holds
        pages = np.arange(step, MAX_PAGE_BYTES + 1, step)
        pages = pages[pages >= max(layers)]
        assert cost_of_geometry(geometry) <= best_cost(layout, pages, 16, min_block_size) + 1e-9

    @pytest.mark.parametrize("layout", MODELS, ids=lambda layout: layout.name)
    def test_the_objective_is_the_charge(self, layout: ModelLayout) -> None:
        """What the solver minimises is what reports show: whole pages charged to each sequence."""
        geometry = solve_geometry(layout)
        charges = geometry.charge(REFERENCE_TOKENS, np.full_like(REFERENCE_TOKENS, 0))
        if layout.has_cross_attention:
            charges = geometry.charge(REFERENCE_TOKENS, np.full_like(REFERENCE_TOKENS, REFERENCE_IMAGE_TOKENS))
        allocated = sum(charge.allocated.mean() for charge in charges.values())
        needed = sum(charge.needed.mean() for charge in charges.values())
        tables = sum(fmt.tables for fmt in geometry.formats if fmt.block_size)
        assert (allocated - needed) / needed + tables * TABLE_COST == pytest.approx(
            cost_of_geometry(geometry), rel=1e-9
        )

    def test_block_sizes_by_group_and_the_smallest_allowed(self) -> None:
        geometry = solve_geometry(gemma_3_27b(), {"full_attention": 64, "sliding_window": 32}, min_block_size=32)
        assert [fmt.block_size for fmt in geometry.formats] == [64, 32]

    def test_full_attention_never_gets_smaller_blocks(self) -> None:
        for layout in MODELS:
            for fmt in solve_geometry(layout, 64, min_block_size=1).formats:
                if fmt.group.spec.kind in {"full_attention", "cross_attention", "mla"}:
                    assert fmt.block_size == 64

    def test_a_bound_below_one_layers_block_gives_that_block(self) -> None:
        geometry = solve_geometry(qwen_3_5_27b(), max_page_bytes=1)
        assert geometry.page_bytes == 3207168  # one layer's state

    def test_errors(self) -> None:
        with pytest.raises(ConfigError, match="block_size 0 of group"):
            solve_geometry(gemma_3_27b(), 0)
        with pytest.raises(ConfigError, match="unknown groups"):
            solve_geometry(gemma_3_27b(), {"nobody": 16})

    def test_only_states(self) -> None:
        layout = layout_of("mamba", (6, RecurrentState((Component("ssm", (64, 16), "float32"),))))
        geometry = solve_geometry(layout)
        check_geometry(geometry, MAX_PAGE_BYTES)
        # A table of one entry per sequence is free: nothing is gained by a page of more than one layer's state.
        assert (geometry.page_bytes, geometry.num_tables) == (4096, 6)
        assert geometry.charge(100)["recurrent_state"].allocated == 6 * 4096

    def test_mixed_latents_and_windows(self) -> None:
        layout = layout_of("mixed", (3, MLA(512, 64, "fp8_ds_mla", 128)), (5, SlidingWindow(2, 64, 64, window=100)))
        geometry = solve_geometry(layout.with_draft([CrossAttention(2, 64, 64)]))
        check_geometry(geometry, MAX_PAGE_BYTES)


class TestKnownGeometries:
    """Worked out by hand; a change here is a change of what every saved figure means."""

    def test_gemma_3_27b(self) -> None:
        # 52 window layers x 8 tokens x 8192 B = 13 x (2 full layers x 16 tokens x 8192 B).
        geometry = solve_geometry(gemma_3_27b())
        assert [(f.block_size, f.tables, f.blocks_per_page) for f in geometry.formats] == [(16, 5, 13), (8, 1, 1)]
        assert geometry.page_bytes == 52 * 8 * 8192 == 13 * 2 * 16 * 8192 == 3407872
        assert geometry.unit == 2 * 16 * 8192
        assert geometry.num_tables == 6
        assert all(fmt.page_tail_bytes == 0 for fmt in geometry.formats)

    def test_gemma_3_27b_with_16_token_blocks(self) -> None:
        geometry = solve_geometry(gemma_3_27b(), min_block_size=16)
        assert [(f.block_size, f.tables, f.blocks_per_page) for f in geometry.formats] == [(16, 5, 13), (16, 2, 1)]
        assert geometry.page_bytes == 26 * 16 * 8192  # half of the 52 window layers

    def test_mimo_v2_flash(self) -> None:
        # 39 window layers x 8 tokens x 5120 B = 13 x (3 full layers x 16 tokens x 2560 B).
        geometry = solve_geometry(mimo_v2_flash())
        assert [(f.block_size, f.tables, f.blocks_per_page) for f in geometry.formats] == [(16, 3, 13), (8, 1, 1)]
        assert geometry.page_bytes == 39 * 8 * 5120 == 13 * 3 * 16 * 2560 == 1597440
        assert geometry.unit == 3 * 16 * 2560

    def test_step_3_5(self) -> None:
        # 33 window layers x 16 tokens x 4096 B = 11 x (3 full layers x 16 tokens x 4096 B).
        geometry = solve_geometry(step_3_5())
        assert [(f.block_size, f.tables, f.blocks_per_page) for f in geometry.formats] == [(16, 4, 11), (16, 1, 1)]
        assert geometry.page_bytes == 33 * 16 * 4096 == 11 * 3 * 16 * 4096 == 2162688
        assert geometry.unit == 3 * 16 * 4096

    def test_qwen_3_5_27b(self) -> None:
        # Two states of 3,207,168 B and 8 KiB of tail = 49 x (2 full layers x 16 tokens x 4096 B): attention keeps its
        # 16-token blocks, where padding states to attention pages takes 784.
        geometry = solve_geometry(qwen_3_5_27b())
        states, full = geometry.formats
        assert (states.tables, states.blocks_per_page, states.page_tail_bytes) == (24, 1, 8192)
        assert (full.block_size, full.tables, full.blocks_per_page, full.page_tail_bytes) == (16, 8, 49, 0)
        assert geometry.page_bytes == 2 * 3207168 + 8192 == 49 * 2 * 16 * 4096
        assert geometry.unit == 8192

    def test_gemma_3_27b_bytes_of_one_request(self) -> None:
        charge = solve_geometry(gemma_3_27b()).charge(8192)
        full, window = charge["full_attention"], charge["sliding_window"]
        # 512 blocks x 5 tables = 2560 in 197 pages of 13; 128 window blocks, a page each.
        assert full.needed == 8192 * 81920
        assert full.free == (197 * 13 - 2560) * 262144
        assert full.allocated == 197 * 3407872
        assert window.allocated == window.needed == 128 * 3407872
        assert full.block_tail == full.out_of_window == full.page_padding == full.group_padding == 0
