"""Arena views against the byte layout written out: `[layer][component][token][head][dim]`, block after block.

Each check fills every live block of an arena through one side (kernel views, or raw blocks) and compares the whole
memory, or every view, with an image that is put together here from the geometry's published numbers alone.
"""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from layouts import deepseek_v3_2, gated_delta_net, gemma_3_27b, layout_of, mimo_v2_flash, mllama_11b, qwen_3_5_27b

from kvtide.kvcache import (
    MLA,
    ChunkedLocal,
    Component,
    ConfigError,
    CrossAttention,
    FullAttention,
    ModelLayout,
    RecurrentState,
    SinkWindow,
    SlidingWindow,
    SlidingWindowMLA,
    preset_names,
)
from kvtide.kvcache.arena import Arena
from kvtide.kvcache.baselines import grouped_geometry, lcm_geometry
from kvtide.kvcache.geometry import BlockFormat, PageGeometry
from kvtide.kvcache.solver import solve_geometry

POISON = 0xA5

EVERY_KIND = layout_of(
    "every-kind",
    (6, FullAttention(2, 24, 16)),
    (4, SlidingWindow(4, 16, 16, "float8_e4m3", window=40)),
    (3, SinkWindow(2, 16, 16, "float8_e5m2", window=40, sinks=4)),
    (2, ChunkedLocal(2, 16, 16, "float32", chunk=64)),
    (2, CrossAttention(2, 16, 16, "float16")),
    (3, MLA(512, 64, "fp8_ds_mla", index_head_dim=128)),
    (2, SlidingWindowMLA(512, 64, "bfloat16", window=64)),
    (4, RecurrentState((Component("conv", (96, 3), "bfloat16"), Component("ssm", (4, 8, 8), "float32")), max_shards=4)),
)
LAYOUTS = [
    EVERY_KIND,
    mimo_v2_flash(),
    mllama_11b(),
    qwen_3_5_27b(),
    deepseek_v3_2("fp8_ds_mla"),
    layout_of("nvfp4", (5, MLA(512, 64, "nvfp4_ds_mla", index_head_dim=128)), (3, MLA(512, 64, "nvfp4_ds_mla"))),
    layout_of("int8", (4, FullAttention(2, 8, 4, "int8")), (6, SlidingWindow(2, 8, 4, "uint8", window=20))),
]
GEOMETRIES = [
    *(solve_geometry(layout) for layout in LAYOUTS),
    solve_geometry(EVERY_KIND, 32, max_page_bytes=40_000),
    solve_geometry(EVERY_KIND, {"full_attention": 1}, min_block_size=2),
    # Pages of the baselines hold padding: empty layers, layer parts larger than their tokens.
    lcm_geometry(layout_of("lcm", (2, FullAttention(2, 16, 16)), (3, gated_delta_net(1, 1, "float32")))),
    grouped_geometry(mimo_v2_flash()),
    grouped_geometry(layout_of("odd", (4, FullAttention(3, 64, 64)), (7, SlidingWindow(4, 64, 64, window=64)))),
]


class Block(NamedTuple):
    """A live block: where it lies, which table of which format it belongs to, and its table entry."""

    fmt: BlockFormat
    table: int
    start: int
    entry: int


def live_blocks(arena: Arena) -> list[Block]:
    """Every slot of every page; pages go to the groups in turn, slots to the group's tables in turn."""
    geometry = arena.geometry
    blocks = []
    for page in range(arena.num_pages):
        fmt = geometry.formats[page % len(geometry.formats)]
        for slot in range(fmt.blocks_per_page):
            start = page * geometry.page_bytes + slot * fmt.block_bytes
            blocks.append(Block(fmt, (slot + page) % fmt.tables, start, arena.entry(page, slot, fmt)))
    return blocks


class Part(NamedTuple):
    """One component of one layer inside a block: where, how many bytes, and what shape a kernel sees."""

    layer: int
    component: Component
    offset: int
    num_bytes: int
    shape: tuple[int, ...]


def parts_of(fmt: BlockFormat, table: int) -> list[Part]:
    """The parts of one table's blocks, in order, from the documented layout."""
    first = table * fmt.layers_per_block
    parts = []
    for position, layer in enumerate(fmt.group.layers[first : first + fmt.layers_per_block]):
        offset = position * fmt.layer_bytes
        for component in fmt.group.spec.components():
            shape = (fmt.block_size, *component.shape) if fmt.block_size else component.shape
            num_bytes = component.num_bytes * (fmt.block_size or 1)
            parts.append(Part(layer, component, offset, num_bytes, shape))
            offset += num_bytes
        assert offset <= (position + 1) * fmt.layer_bytes
    return parts


class Views:
    """Views of an arena, each made once, read and written as bytes."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.made: dict[tuple[int, str], torch.Tensor] = {}

    def at(self, part: Part, entry: int) -> torch.Tensor:
        key = part.layer, part.component.name
        if key not in self.made:
            self.made[key] = self.arena.view(*key)
        view = self.made[key][entry]
        assert view.shape == part.shape
        return view

    def read(self, part: Part, entry: int) -> np.ndarray:
        return self.at(part, entry).contiguous().view(torch.uint8).numpy().reshape(-1)

    def write(self, part: Part, entry: int, content: np.ndarray) -> None:
        view = self.at(part, entry)
        view.copy_(torch.from_numpy(content).view(view.dtype).reshape(view.shape))


def poisoned(geometry: PageGeometry, num_pages: int) -> Arena:
    arena = Arena(geometry, num_pages)
    arena.memory.fill_(POISON)
    return arena


def check_views(geometry: PageGeometry, num_pages: int) -> None:
    """Write through views, compare all bytes; write all bytes, compare through views."""
    arena = poisoned(geometry, num_pages)
    views = Views(arena)
    blocks = live_blocks(arena)
    noise = np.random.default_rng(0)
    image = np.full(arena.num_bytes, POISON, np.uint8)
    owned = np.zeros(arena.num_bytes, np.uint8)
    for block in blocks:
        assert block.entry * geometry.unit == block.start
        owned[block.start : block.start + block.fmt.block_bytes] += 1
        for part in parts_of(block.fmt, block.table):
            content = noise.integers(0, 256, part.num_bytes, np.uint8)
            views.write(part, block.entry, content)
            image[block.start + part.offset :][: part.num_bytes] = content
    assert owned.max() == 1, "two live blocks overlap"
    # Every write landed where the layout says, and nowhere else: tails and padding still hold the poison.
    assert np.array_equal(arena.memory.numpy(), image)

    for block in blocks:
        content = noise.integers(0, 256, block.fmt.block_bytes, np.uint8)
        image[block.start : block.start + block.fmt.block_bytes] = content
        arena.block(block.entry, block.fmt).copy_(torch.from_numpy(content))
    assert np.array_equal(arena.memory.numpy(), image)
    for block in blocks:
        covered = 0
        for part in parts_of(block.fmt, block.table):
            expected = image[block.start + part.offset :][: part.num_bytes]
            assert np.array_equal(views.read(part, block.entry), expected), (block, part.layer, part.component.name)
            covered += part.num_bytes
        first = block.table * block.fmt.layers_per_block
        real = min(block.fmt.layers_per_block, len(block.fmt.group.layers) - first)
        spec = block.fmt.group.spec
        assert covered == real * (spec.state_bytes or spec.bytes_per_token * block.fmt.block_size)
        if geometry.policy == "kvtide":
            assert covered == block.fmt.block_bytes, "kvtide's blocks hold no padding"


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: f"{g.policy}-{g.layout.name}")
def test_views_and_blocks_are_the_same_bytes(geometry: PageGeometry) -> None:
    check_views(geometry, 2 * len(geometry.formats))


def shrunk(layout: ModelLayout) -> ModelLayout:
    """The layout on as many ranks as divide it, up to 8: the same kinds and splits, fewer bytes."""
    for tp_size in (8, 4, 2):
        try:
            return layout.shard(tp_size)
        except ConfigError:
            continue
    return layout


@pytest.mark.parametrize("name", preset_names())
def test_every_preset(name: str) -> None:
    layout = ModelLayout.preset(name)
    geometry = solve_geometry(shrunk(layout), max_page_bytes=2**20)
    check_views(geometry, len(geometry.formats))


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_every_preset_whole_has_aligned_views_of_all_layers(name: str, dtype: str) -> None:
    """At full size: every view can be made, starts where the layout says, and steps by one unit."""
    layout = ModelLayout.preset(name).with_dtype(dtype)
    geometry = solve_geometry(layout)
    arena = Arena(geometry, 1)
    for fmt in geometry.formats:
        for table in range(fmt.tables):
            for part in parts_of(fmt, table):
                view = arena.view(part.layer, part.component.name)
                assert view.stride(0) * view.element_size() == geometry.unit
                assert view.storage_offset() * view.element_size() == part.offset
                assert view[0].is_contiguous()
                assert part.offset % 16 == 0, "kernels load 16 bytes at a time"
    assert geometry.unit % 16 == 0
    # Memory of the largest machines stays within int32 entries.
    assert geometry.max_arena_bytes >= 2**40


def test_two_groups_share_pages_without_touching() -> None:
    """A page that changes hands: entries of the new group never reach the neighbours of that page."""
    geometry = solve_geometry(EVERY_KIND)
    arena = poisoned(geometry, 3)
    views = Views(arena)
    page = geometry.page_bytes
    for fmt in geometry.formats:
        arena.memory.fill_(POISON)
        for slot in range(fmt.blocks_per_page):
            entry = arena.entry(1, slot, fmt)
            for part in parts_of(fmt, slot % fmt.tables):
                views.write(part, entry, np.zeros(part.num_bytes, np.uint8))
        memory = arena.memory.numpy()
        assert (memory[:page] == POISON).all()
        assert (memory[2 * page :] == POISON).all()
        assert not memory[page : 2 * page - fmt.page_tail_bytes].any()
        assert (memory[2 * page - fmt.page_tail_bytes : 2 * page] == POISON).all()


def test_the_order_inside_a_block() -> None:
    """By hand: two layers of two heads, K of 3 and V of 2 values, 4 tokens, one byte each."""
    layout = layout_of("tiny", (2, FullAttention(2, 3, 2, "uint8")))
    geometry = solve_geometry(layout, 4)
    fmt = geometry.formats[0]
    arena = poisoned(geometry, 3)
    assert (fmt.tables, fmt.block_bytes, geometry.unit) == (1, 2 * 4 * 2 * (3 + 2), 80)
    block = arena.block(arena.entry(2, 0, fmt), fmt)
    block.copy_(torch.arange(80, dtype=torch.uint8))
    entry = arena.entry(2, 0, fmt)
    for layer in range(2):
        for token in range(4):
            for head in range(2):
                for dim in range(3):
                    expected = layer * 40 + token * 6 + head * 3 + dim
                    assert arena.view(layer, "k")[entry, token, head, dim] == expected
                for dim in range(2):
                    expected = layer * 40 + 24 + token * 4 + head * 2 + dim
                    assert arena.view(layer, "v")[entry, token, head, dim] == expected


def test_tables_of_int32_entries_gather_blocks() -> None:
    """What a paged kernel does: `view[table]`, a table row of int32 entries."""
    geometry = solve_geometry(qwen_3_5_27b().shard(4))
    arena = poisoned(geometry, 4)
    fmt = geometry.format_of(50)
    assert fmt.block_size == 16
    table = torch.tensor([arena.entry(p, s, fmt) for p, s in ((3, 1), (0, 0), (2, 5))], dtype=torch.int32)
    view = arena.view(50, "v")
    for i, entry in enumerate(table.tolist()):
        view[entry] = i
    gathered = torch.index_select(view, 0, table)
    assert gathered.shape == (3, *view.shape[1:])
    assert gathered.flatten(1).unique(dim=1).tolist() == [[0.0], [1.0], [2.0]]


class TestLimits:
    def test_entries_outside_the_arena(self) -> None:
        geometry = solve_geometry(gemma_3_27b().shard(16))
        fmt = geometry.formats[0]
        arena = Arena(geometry, 2)
        last = arena.entry(1, fmt.blocks_per_page - 1, fmt)
        assert (last + fmt.block_bytes // geometry.unit) * geometry.unit <= arena.num_bytes
        for page, slot in ((2, 0), (-1, 0), (0, -1), (0, fmt.blocks_per_page)):
            with pytest.raises(ConfigError, match=f"block {slot} of page {page} is outside 2 pages of"):
                arena.entry(page, slot, fmt)

    def test_blocks_outside_the_arena(self) -> None:
        """A short or shifted slice would be copied without a word."""
        geometry = solve_geometry(gemma_3_27b().shard(16))
        arena = Arena(geometry, 2)
        for fmt in geometry.formats:
            last = (arena.num_bytes - fmt.block_bytes) // geometry.unit
            assert arena.block(last, fmt).numel() == fmt.block_bytes
            for entry in (-1, last + 1, 2**31):
                with pytest.raises(ConfigError, match=f"entry {entry} "):
                    arena.block(entry, fmt)

    def test_views_end_with_the_last_block_that_fits(self) -> None:
        geometry = solve_geometry(gemma_3_27b().shard(16))
        arena = Arena(geometry, 2)
        for fmt in geometry.formats:
            view = arena.view(fmt.group.layers[-1], "v")
            assert view.shape[0] == (arena.num_bytes - fmt.block_bytes) // geometry.unit + 1
            assert arena.block(view.shape[0] - 1, fmt).numel() == fmt.block_bytes

    def test_no_pages(self) -> None:
        for pages in (0, -1):
            with pytest.raises(ConfigError, match=f"num_pages {pages} must be at least 1"):
                Arena(solve_geometry(gemma_3_27b()), pages)

    def test_more_than_int32_units_are_refused_before_any_memory_is_taken(self) -> None:
        geometry = solve_geometry(layout_of("bytes", (1, FullAttention(1, 1, 1, "uint8"))), 1)
        assert geometry.unit == 2
        pages = 2**31 * geometry.unit // geometry.page_bytes
        with pytest.raises(ConfigError, match=r"more than 2\*\*31 units of 2 bytes; at most 4294967296 bytes"):
            Arena(geometry, pages + 1)

    def test_offsets_beyond_int32(self) -> None:
        """An arena past 2 GiB (reserved, hardly touched): element offsets of views need int64."""
        geometry = solve_geometry(layout_of("wide", (1, FullAttention(8, 128, 128, "uint8"))), 4096)
        fmt = geometry.formats[0]
        pages = 2**31 // geometry.page_bytes + 2
        arena = Arena(geometry, pages)
        entry = arena.entry(pages - 1, 0, fmt)
        assert entry * geometry.unit > 2**31
        view = arena.view(0, "v")
        view[entry] = 7
        view[0] = 1
        block = arena.block(entry, fmt)
        assert block.data_ptr() - arena.memory.data_ptr() == (pages - 1) * geometry.page_bytes
        half = fmt.block_bytes // 2
        assert (block[half:] == 7).all()
        assert int(view[entry].sum(dtype=torch.int64)) == 7 * half

    def test_misaligned_offsets(self) -> None:
        arrays = (Component("a", (1, 3), "bfloat16"), Component("b", (2,), "float32"), Component("c", (1,), "bfloat16"))
        arena = Arena(solve_geometry(layout_of("odd", (1, RecurrentState(arrays)))), 4)
        assert arena.geometry.unit == 16
        with pytest.raises(ConfigError, match=r"^b of layer 0 is float32 at byte 6 of units of 16 bytes.*4-byte elem"):
            arena.view(0, "b")
        assert arena.view(0, "c").storage_offset() == 7

    def test_misaligned_units(self) -> None:
        # A float32 of 4 bytes beside blocks of 2 bytes: an entry may point between two floats.
        states = RecurrentState((Component("ssm", (1,), "float32"),))
        arena = Arena(solve_geometry(layout_of("odd", (1, states), (1, FullAttention(1, 1, 1, "uint8"))), 1), 4)
        with pytest.raises(ConfigError, match=r"^ssm of layer 0 is float32 at byte 0 of units of 2 bytes"):
            arena.view(0, "ssm")
        assert arena.view(1, "v").storage_offset() == 1

    def test_layers_without_kv_and_unknown_components(self) -> None:
        arena = Arena(solve_geometry(qwen_3_5_27b().shard(4)), 1)
        with pytest.raises(ConfigError, match=r"layer 64 of qwen3\.5-27b stores no KV of its own"):
            arena.view(64, "k")
        with pytest.raises(ConfigError, match=r"group recurrent_state has no component 'k'; it has \['conv', 'ssm'\]"):
            arena.view(0, "k")


def test_without_torch_the_error_names_the_extra() -> None:
    """In a process where torch cannot be imported; everything but the arena works there."""
    program = """
import sys
sys.modules["torch"] = None
from kvtide.kvcache import FullAttention, Layer, MissingExtra, ModelLayout
from kvtide.kvcache.arena import Arena
from kvtide.kvcache.policies import plan_geometry
geometry = plan_geometry("kvtide", ModelLayout("m", (Layer(0, FullAttention(1, 1, 1)),)))
geometry.charge(100)
try:
    Arena(geometry, 1)
except MissingExtra as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "the arena needs the package 'torch'; install it with: pip install 'kvtide[torch]'\n"


def test_importing_the_package_does_not_import_torch() -> None:
    program = "import sys, kvtide.kvcache, kvtide.kvcache.arena, kvtide.kvcache.policies; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_pinned_memory_without_an_accelerator_is_one_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine can pin memory")
    geometry = solve_geometry(layout_of("small", (1, FullAttention(1, 8, 8))))
    with pytest.raises(ConfigError, match="not possible"):
        Arena(geometry, 1, pin_memory=True)
