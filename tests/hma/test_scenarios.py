"""Small named cases: public bug reports of hybrid allocators with the right values, and what our own search has found.

Numbers in the names are those of the reports. Blocks of all groups have the same size here unless a test says
otherwise, so that a page is a block and a pool can be given in blocks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from layouts import layout_of
from oracle import Engine, fingerprint, geometry_of

from kvtide.hma import HybridMemoryManager, Item
from kvtide.hma.hashing import SPAN, KeyChain, namespace
from kvtide.hma.pool import PagePool
from kvtide.hma.prefix_index import PrefixIndex
from kvtide.kvcache import (
    ChunkedLocal,
    Component,
    ConfigError,
    CrossAttention,
    Exhausted,
    FullAttention,
    KvtideError,
    Layer,
    LayerSpec,
    ModelLayout,
    RecurrentState,
    SinkWindow,
    SlidingWindow,
)
from kvtide.kvcache.geometry import PageGeometry

FULL = FullAttention(1, 1, 1)


def window(size: int) -> SlidingWindow:
    return SlidingWindow(1, 1, 1, window=size)


def state(width: int = 1) -> RecurrentState:
    return RecurrentState((Component("s", (1, width), "float32"),))


def geometry(*groups: tuple[LayerSpec, int], counts: Sequence[int] | None = None, factor: int = 1) -> PageGeometry:
    """Groups of `(spec, tokens per block)`, one layer each or as `counts` say; a page is `factor` largest blocks."""
    numbers = counts or [1] * len(groups)
    layout = layout_of("scenario", *((n, spec) for n, (spec, _) in zip(numbers, groups, strict=True)))
    sizes = {group.name: size for group, (_, size) in zip(layout.groups, groups, strict=True)}
    return geometry_of(layout, sizes, {group.name: len(group.layers) for group in layout.groups}, factor)


def manager(cut: PageGeometry, blocks: int, **options: Any) -> HybridMemoryManager:
    options.setdefault("max_model_len", 20_000)
    options.setdefault("max_requests", 8)
    return HybridMemoryManager(cut, blocks * cut.page_bytes, **options)


def tokens(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, 30_000, count)


def step(m: HybridMemoryManager, row: int, count: int, ids: Sequence[int] | None = None, **options: Any) -> None:
    m.reserve([row], [count], **options)
    m.commit([row], [count], ids)
    m.check()


def compute(m: HybridMemoryManager, name: str, prompt: Sequence[int] | np.ndarray[Any, Any], **options: Any) -> int:
    """Admit a prompt and compute all of it in one step; returns its row."""
    row = m.admit(name, prompt, **options).row
    step(m, row, len(prompt) - int(m.committed[row]))
    return row


def cache(m: HybridMemoryManager, prompt: Sequence[int] | np.ndarray[Any, Any], **options: Any) -> None:
    m.release(compute(m, "cached", prompt, **options))


def hit(m: HybridMemoryManager, prompt: Sequence[int] | np.ndarray[Any, Any], **options: Any) -> int:
    """Cached tokens of a prompt; leaves nothing behind."""
    admission = m.admit("probe", prompt, **options)
    m.check()
    m.release(admission.row)
    return admission.num_cached_tokens


def blocks(m: HybridMemoryManager, group: str, row: int) -> list[int]:
    """Logical blocks that a row holds."""
    logical, entries = m.tables[group].held(row)
    return logical[entries[0] >= 0].tolist()


def used(m: HybridMemoryManager) -> int:
    return int((m.pool.refs > 0).sum())


# -- windows, chunks, sinks: what is held and what a hit takes --------------------------------------------------------


def test_window_of_4_in_blocks_of_2_frees_as_it_slides() -> None:
    m = manager(geometry((window(4), 2)), 20)
    row = m.admit("r", tokens(12)).row
    held = {}
    for count in (4, 1, 1, 1, 4):
        step(m, row, count)
        held[int(m.committed[row])] = blocks(m, "sliding_window", row)
    assert held == {4: [0, 1], 5: [1, 2], 6: [1, 2], 7: [2, 3], 11: [4, 5]}


def test_window_hit_takes_only_the_blocks_in_reach() -> None:
    m = manager(geometry((window(4), 2)), 20)
    cache(m, tokens(12))
    for length in (2, 4, 6, 10):
        row = m.admit("probe", tokens(12)[: length + 1]).row
        assert int(m.committed[row]) == length
        assert blocks(m, "sliding_window", row) == list(range(max(0, length - 3) // 2, length // 2))
        m.release(row)


def test_blocks_left_of_the_chunk_count_as_computed() -> None:
    m = manager(geometry((ChunkedLocal(1, 1, 1, chunk=8), 2)), 20)
    cache(m, tokens(14))
    row = m.admit("probe", tokens(14)[:13]).row
    assert int(m.committed[row]) == 12
    assert blocks(m, "chunked_local", row) == [4, 5]


def test_38_51150_a_chunk_does_not_slide() -> None:
    m = manager(geometry((ChunkedLocal(1, 1, 1, chunk=8), 1)), 20)
    row = compute(m, "r", tokens(13))
    assert blocks(m, "chunked_local", row) == [8, 9, 10, 11, 12]


def test_chunk_of_6_in_blocks_of_4_needs_three_blocks() -> None:
    m = manager(geometry((ChunkedLocal(1, 1, 1, chunk=6), 4)), 8, lookahead=2)
    row = compute(m, "r", tokens(11))
    m.reserve([row], [1])
    assert blocks(m, "chunked_local", row) == [1, 2, 3]


def test_only_the_gap_behind_sinks_is_freed() -> None:
    m = manager(geometry((SinkWindow(1, 1, 1, window=4, sinks=3), 2)), 30)
    row = m.admit("r", tokens(30)).row
    for _ in range(6):
        step(m, row, 4)
    assert blocks(m, "sink_window", row) == [0, 1, 10, 11]


def test_windows_slide_on_committed_tokens_not_on_those_in_flight() -> None:
    m = manager(geometry((window(4), 2)), 20)
    row = m.admit("r", tokens(12)).row
    m.reserve([row], [4])
    m.reserve([row], [4])
    assert blocks(m, "sliding_window", row) == [0, 1, 2, 3]
    m.commit([row], [4])
    assert blocks(m, "sliding_window", row) == [0, 1, 2, 3]
    m.commit([row], [4])
    assert blocks(m, "sliding_window", row) == [2, 3]


# -- admission and capacity -------------------------------------------------------------------------------------------


def test_01_39734_long_prompt_is_not_charged_its_whole_length_for_a_window() -> None:
    m = manager(geometry((FULL, 16), (window(1024), 16)), 705, max_step_tokens=2048)
    row = m.admit("r", tokens(8192)).row
    for _ in range(4):
        step(m, row, 2048)
    assert used(m) == 512 + 64


def test_02_55800_drafter_with_small_blocks_beside_large_ones_is_admitted() -> None:
    cut = geometry((FULL, 2304), (window(2048), 16))
    # 9 pages for 20,000 tokens, and two for the window before and after a step; 1,153 window blocks would be 9 more.
    m = manager(cut, 11, max_step_tokens=4096, max_model_len=20_000)
    row = m.admit("r", tokens(20_000)).row
    while (done := int(m.committed[row])) < 20_000:
        step(m, row, min(4096, 20_000 - done), kv_from_activations=True)
    assert len(blocks(m, "sliding_window", row)) <= 130


def test_03_54703_tiny_window_is_charged_its_window_not_the_tokens_in_flight() -> None:
    m = manager(geometry((window(4), 4)), 4, max_step_tokens=32_768, max_model_len=40_000)
    row = m.admit("r", tokens(32_769)).row
    step(m, row, 32_768, kv_from_activations=True)
    assert len(blocks(m, "sliding_window", row)) == 1
    step(m, row, 1)
    assert len(blocks(m, "sliding_window", row)) == 2


def test_prefill_burst_takes_the_window_when_the_kernel_reads_activations() -> None:
    m = manager(geometry((window(64), 16)), 600)
    row = m.admit("r", tokens(8193)).row
    m.reserve([row], [8192])
    assert used(m) == 512
    m.preempt(row)
    m.commit([], [])
    m.resume(row)
    plan = m.reserve([row], [8192], kv_from_activations=True)
    assert used(m) == 4
    assert (m.slots(plan, "sliding_window")[0] >= 0).sum() == 64


def test_07_40691_one_request_gets_every_token_that_the_pool_can_hold() -> None:
    m = manager(geometry((FULL, 16), (window(1024), 16), counts=[1, 5]), 5999, max_model_len=100_000)
    row = m.admit("r", tokens(100_000)).row
    for _ in range(90_784 // 16):
        m.reserve([row], [16])
        m.commit([row], [16])
    assert int(m.committed[row]) == (5999 - 5 * 65) * 16
    with pytest.raises(Exhausted):
        m.reserve([row], [16])


def test_14_tiny_prompt_takes_one_page_per_group() -> None:
    cut = geometry((state(1000), 0), (FULL, 16), (window(64), 8), counts=[2, 4, 4])
    m = manager(cut, 40)
    row = m.admit("r", tokens(12)).row
    step(m, row, 12)
    assert m.pool.num_pages - m.pool.reclaimable_pages <= 2 + 2


def test_27_42571_window_cycles_through_a_pool_of_four_blocks() -> None:
    m = manager(geometry((window(8), 4)), 4)
    row = m.admit("r", tokens(64)).row
    for _ in range(16):
        plan = m.reserve([row], [4])
        entries = m.tables["sliding_window"].held(row)[1][0]
        assert len(set(entries.tolist())) == len(entries) <= 3
        assert (m.slots(plan, "sliding_window") >= 0).all()
        m.commit([row], [4])
        m.check()


def test_hit_that_was_evictable_is_counted_once() -> None:
    m = manager(geometry((FULL, 4)), 4)
    cache(m, tokens(12))
    row = m.admit("same", tokens(13)).row
    assert int(m.committed[row]) == 12
    with pytest.raises(Exhausted) as refused:
        m.reserve([row], [5])
    assert refused.value.pages_short == 1
    step(m, row, 1)
    assert used(m) == 4


def test_25_33775_no_groups_growth_evicts_anothers_hit() -> None:
    m = manager(geometry((FULL, 4), (window(8), 4)), 9)
    cache(m, tokens(8))
    row = m.admit("same", tokens(9)).row
    hits = {name: table.held(row)[1].copy() for name, table in m.tables.items()}
    assert [part.shape[1] for part in hits.values()] == [2, 2]
    plan = m.reserve([row], [8])
    for name, table in m.tables.items():
        entries = table.held(row)[1]
        assert (entries[:, :2] == hits[name]).all()
        assert entries.shape[1] == 4
    assert plan.num_tokens.tolist() == [8]
    m.check()


# -- the prefix cache -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [4096, 16])
def test_15_48435_stream_of_window_blocks_evicts_nobody_elses_prefix(prompt: int) -> None:
    """Whether it is the prompt that streams by or what is generated."""
    m = manager(geometry((window(64), 16)), 64, max_model_len=5000)
    cache(m, tokens(128))
    stream = tokens(4096, seed=1)
    row = m.admit("stream", stream[:prompt]).row
    for start in range(0, 4096, 16):
        step(m, row, 16, stream[start : start + 16] if start >= prompt else None)
    assert hit(m, np.append(tokens(128), 5)) == 128


@pytest.mark.parametrize(
    ("shared", "expected"), [(4100, 4096), (4096, 4096), (4095, 4064), (4064, 4064), (4063, 4032), (2048, 2048)]
)
def test_16_57610_sibling_hits_up_to_where_it_parts(shared: int, expected: int) -> None:
    m = manager(geometry((FULL, 32), (window(1024), 16)), 2000)
    cache(m, tokens(4100))
    assert hit(m, np.concatenate([tokens(4100)[:shared], tokens(50, seed=1)])) == expected


def test_17_32802_drop_is_applied_once_over_three_groups() -> None:
    m = manager(geometry((FULL, 16), (window(32), 16), (window(64), 16)), 100, drop_last_block=True)
    cache(m, tokens(160))
    assert hit(m, np.append(tokens(160), 1)) == 9 * 16


def test_17_51771_group_that_cannot_hit_is_named() -> None:
    m = manager(geometry((FULL, 16), (state(), 0)), 100)
    cache(m, tokens(160))
    admission = m.admit("r", tokens(160))
    assert admission.num_cached_tokens == 0
    assert admission.limited_by == ("recurrent_state",)


def test_18_16270_hits_are_not_rounded_to_the_largest_window_block() -> None:
    sizes = [(FULL, 128), (window(40), 32), (window(5), 2), (window(17), 8)]
    m = manager(geometry(*sizes), 3000)
    cache(m, tokens(6000))
    other = np.concatenate([tokens(6000)[:2050], tokens(10, seed=1)])
    assert hit(m, other) == 2048
    m = manager(geometry(*sizes, (FullAttention(1, 1, 2), 4096)), 60)
    cache(m, tokens(6000))
    admission = m.admit("r", other)
    assert admission.num_cached_tokens == 0
    assert admission.limited_by == ("full_attention_2",)


def test_19_53912_state_obeys_the_drop() -> None:
    m = manager(geometry((FULL, 16), (state(), 0)), 60, drop_last_block=True)
    row = m.admit("r", tokens(40)).row
    for _ in range(2):
        step(m, row, 16)
        assert len(m.checkpoint(row)) == 1
    m.release(row)
    assert hit(m, tokens(40)) == 16


def test_21_54661_draft_blocks_are_taken_before_any_target_block() -> None:
    spec = FullAttention(2, 1, 1)
    layout = ModelLayout("drafter", (Layer(0, FULL), Layer(1, FULL), Layer(2, spec, draft=True)))
    sizes = {"full_attention": 4, "full_attention_2": 4}
    m = manager(geometry_of(layout, sizes, {"full_attention": 1, "full_attention_2": 1}), 40)
    cache(m, tokens(40), priority=3)
    cache(m, tokens(40, seed=1))
    draft = m.group("full_attention_2").number
    assert m.pool.counts(draft).evictable == 20
    row = m.admit("other", tokens(40, seed=2)).row
    m.reserve([row], [40])
    target = m.group("full_attention").number
    assert m.pool.counts(draft).evictable == 0
    assert m.pool.counts(target).evictable == 20


def test_scratch_is_used_before_cached_blocks() -> None:
    m = manager(geometry((FULL, 4)), 4)
    cache(m, tokens(13))
    row = m.admit("other", tokens(4, seed=1)).row
    m.reserve([row], [4])
    m.preempt(row)
    m.commit([], [])
    assert hit(m, tokens(13)) == 12


def test_tail_goes_before_head() -> None:
    m = manager(geometry((FULL, 4)), 8)
    cache(m, tokens(32))
    row = m.admit("other", tokens(8, seed=1)).row
    for left in (28, 24):
        step(m, row, 4)
        assert hit(m, np.append(tokens(32), 1)) == left


def test_higher_priority_outlives_lower() -> None:
    m = manager(geometry((FULL, 4)), 9)
    cache(m, tokens(16), priority=1)
    cache(m, tokens(16, seed=1))
    row = m.admit("other", tokens(20, seed=2)).row
    m.reserve([row], [20])
    assert hit(m, np.append(tokens(16), 1)) == 16
    assert hit(m, np.append(tokens(16, seed=1), 1)) == 0


def test_48489_deferred_frees_keep_the_order_of_immediate_ones() -> None:
    def order(*, deferred: bool) -> list[list[int]]:
        m = manager(geometry((FULL, 4), (window(100), 4)), 18)
        row = compute(m, "r", tokens(16))
        held = np.concatenate([table.held(row)[1][0] for table in m.tables.values()]).tolist()
        if deferred:
            other = m.admit("other", tokens(1, seed=3)).row
            m.reserve([row, other], [1, 1])
            m.release(row)
            m.commit([other], [1])
            m.release(other)
        else:
            m.release(row)
        taken = []
        row = m.admit("next", tokens(40, seed=2)).row
        for _ in range(16):
            try:
                step(m, row, 4)
            except Exhausted:
                break
            taken.append([int(table.held(row)[1][0, -1]) for table in m.tables.values()])
        assert len(held) == 8
        return [[entry for entry in pair if entry in held] for pair in taken if set(pair) & set(held)]

    immediate, deferred = order(deferred=False), order(deferred=True)
    assert [entry for pair in deferred for entry in pair] == [entry for pair in immediate for entry in pair]
    assert len([entry for pair in immediate for entry in pair]) == 8


def test_blocks_of_a_step_in_flight_are_fenced() -> None:
    m = manager(geometry((FULL, 4)), 6)
    a, b = m.admit("a", tokens(9)).row, m.admit("b", tokens(12, seed=1)).row
    m.reserve([a], [8])
    m.reserve([b], [8])
    m.preempt(a)
    assert used(m) == 4
    with pytest.raises(KvtideError, match="in flight"):
        m.reserve([b], [4])
    m.commit([], [])
    assert used(m) == 2
    m.check()
    m.commit([b], [8])
    m.release(a)
    m.check()


# -- what is shared and what never is ---------------------------------------------------------------------------------

CAT, DOG = Item(3, b"cat"), Item(3, b"dog")


@pytest.mark.parametrize(
    ("mine", "yours"),
    [
        ({"salt": "a"}, {"salt": "b"}),
        ({"salt": "a"}, {}),
        ({"adapter": "a"}, {"adapter": "b"}),
        ({"salt": "a"}, {"adapter": "a"}),
        ({"salt": "ab", "adapter": "c"}, {"salt": "a", "adapter": "bc"}),
        ({"items": [CAT]}, {"items": [DOG]}),
        ({"items": [CAT]}, {}),
        ({"items": [CAT]}, {"items": [Item(2, b"cat")]}),
        ({"items": [CAT, Item(3, b"dog")]}, {"items": [Item(3, b"catdog")]}),
    ],
)
def test_different_salts_adapters_and_items_never_share(mine: dict[str, Any], yours: dict[str, Any]) -> None:
    m = manager(geometry((FULL, 4)), 40)
    cache(m, tokens(16), **mine)
    assert hit(m, tokens(17)[:17], **yours) == 0
    assert hit(m, np.append(tokens(16), 1), **yours) == 0
    assert hit(m, np.append(tokens(16), 1), **mine) == 16


def test_item_separates_from_its_block_on() -> None:
    m = manager(geometry((FULL, 4)), 40)
    cache(m, tokens(16), items=[Item(9, b"cat")])
    assert hit(m, np.append(tokens(16), 1), items=[Item(9, b"dog")]) == 8


def test_models_and_keys_separate_caches() -> None:
    def keys(**options: Any) -> list[bytes]:
        m = manager(geometry((FULL, 4)), 40, **options)
        m.admit("r", tokens(16))
        return list(m._sequences.chain(0).keys)

    kinds = [keys(), keys(model_id="m"), keys(hash_key=b"k"), keys(model_id="mk"), keys(model_id="m", hash_key=b"k")]
    assert len({key for chain in kinds for key in chain}) == 5 * 4
    assert keys() == keys()


@pytest.mark.parametrize(
    "dtype", ["i1", "u1", "<i2", ">i2", "<u2", ">u2", "<i4", ">i4", ">u4", "<i8", ">i8", "<u8", ">u8"]
)
def test_any_integer_type_and_byte_order_gives_the_same_key(dtype: str) -> None:
    m = manager(geometry((FULL, 4)), 40)
    ids = tokens(17) % 128
    cache(m, ids)
    assert hit(m, ids.astype(dtype)) == 16
    assert hit(m, ids.astype(dtype).tolist()) == 16
    assert hit(m, np.repeat(ids, 2).astype(dtype)[::2]) == 16


def test_keys_are_the_same_in_every_process() -> None:
    code = (
        "from kvtide.hma.hashing import KeyChain, namespace; import numpy as np\n"
        "chain = KeyChain(4, namespace('model', 'salt', b'key'))\n"
        "chain.extend(np.arange(12, dtype='<i4').tobytes())\n"
        "print(chain.keys[-1].hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("0", "1", "random")
    }
    chain = KeyChain(4, namespace("model", "salt", b"key"))
    chain.extend(np.arange(12, dtype="<i4").tobytes())
    assert found == {chain.keys[-1].hex()}


def test_a_span_is_skipped_only_while_all_its_keys_are_known() -> None:
    prompt = np.arange(4 * (SPAN + 3), dtype="<i4").tobytes()

    def chain() -> KeyChain:
        return KeyChain(4, namespace("model"), prompt)

    def run() -> list[int]:
        return index.find_run(chain(), SPAN + 3).tolist()

    keys = chain().keys
    assert len(set(keys)) == SPAN + 3
    index = PrefixIndex([1], 100)
    numbers = np.arange(SPAN + 1)
    nodes = index.nodes_for(keys[: SPAN + 1])
    index.insert(0, nodes, numbers[:, None])
    index.join_spans(np.zeros_like(numbers), numbers, nodes)
    assert run() == [*nodes.tolist(), -1]
    skipping = chain()
    index.find_run(skipping, SPAN + 3)
    assert skipping.span_keys == keys[SPAN - 1 : SPAN]
    assert skipping.between(SPAN, None) == keys[SPAN:]
    assert skipping.between(3, 5) == keys[3:5]
    assert skipping.keys == keys
    index.remove(np.array([7]))
    assert run() == [*nodes[:7].tolist(), -1]
    # The same node under another key, and then the key again in another node.
    index.nodes_for([b"other"])
    assert run() == [*nodes[:7].tolist(), -1]
    index.insert(0, index.nodes_for([keys[7]]), np.array([[7]]))
    again = run()
    assert again[:7] + again[8:] == [*nodes[:7].tolist(), *nodes[8:].tolist(), -1]
    assert again == run()
    index.remove(np.array([SPAN - 1]))
    assert run() == [*again[: SPAN - 1], -1]


# -- errors change nothing --------------------------------------------------------------------------------------------


def busy(**options: Any) -> tuple[HybridMemoryManager, list[int]]:
    """Three rows: two running with a step in flight, one preempted."""
    m = manager(geometry((FULL, 4), (window(6), 2), factor=2), 9, max_model_len=64, max_step_tokens=24, **options)
    rows = [compute(m, name, tokens(9, seed=i)) for i, name in enumerate("abc")]
    m.preempt(rows[2])
    m.reserve(rows[:2], [3, 3], num_drafts=[2, 2])
    return m, rows


WRONG: dict[str, tuple[type[Exception], Callable[[HybridMemoryManager, list[int]], object]]] = {
    "does not fit": (Exhausted, lambda m, r: m.reserve([r[0]], [24])),
    "rows in another order": (KvtideError, lambda m, r: m.commit([r[1], r[0]], [1, 1], [1, 1])),
    "one row of two": (KvtideError, lambda m, r: m.commit([r[0]], [1], [1])),
    "a row too many": (KvtideError, lambda m, r: m.commit([*r], [1, 1, 1], [1, 1, 1])),
    "too many accepted": (KvtideError, lambda m, r: m.commit(r[:2], [4, 1], [1] * 5)),
    "negative accepted": (KvtideError, lambda m, r: m.commit(r[:2], [-1, 1], [1])),
    "accepted of another shape": (KvtideError, lambda m, r: m.commit(r[:2], [1], [1])),
    "a token id too few": (KvtideError, lambda m, r: m.commit(r[:2], [2, 1], [1, 2])),
    "a token id too many": (KvtideError, lambda m, r: m.commit(r[:2], [2, 1], [1, 2, 3, 4])),
    "no token ids": (KvtideError, lambda m, r: m.commit(r[:2], [2, 1])),
    "negative token id": (ConfigError, lambda m, r: m.commit(r[:2], [1, 1], [1, -1])),
    "token id of 32 bits": (ConfigError, lambda m, r: m.commit(r[:2], [1, 1], [1, 2**31])),
    "fractional token id": (ConfigError, lambda m, r: m.commit(r[:2], [1, 1], [1.0, 2.0])),
    "row of nobody": (KvtideError, lambda m, r: m.reserve([7], [1])),
    "row out of range": (KvtideError, lambda m, r: m.reserve([8], [1])),
    "negative row": (KvtideError, lambda m, r: m.reserve([-1], [1])),
    "preempted row": (KvtideError, lambda m, r: m.reserve([r[0], r[2]], [1, 1])),
    "row twice": (KvtideError, lambda m, r: m.reserve([r[0], r[0]], [1, 1])),
    "no tokens": (KvtideError, lambda m, r: m.reserve([r[0]], [0])),
    "too many tokens": (KvtideError, lambda m, r: m.reserve([r[0]], [25])),
    "drafts alone": (KvtideError, lambda m, r: m.reserve([r[0]], [2], num_drafts=[2])),
    "counts of another shape": (KvtideError, lambda m, r: m.reserve([r[0]], [1, 1])),
    "preempt nobody": (KvtideError, lambda m, r: m.preempt(7)),
    "preempt twice": (KvtideError, lambda m, r: m.preempt(r[2])),
    "preempt out of range": (KvtideError, lambda m, r: m.preempt(99)),
    "resume a running row": (KvtideError, lambda m, r: m.resume(r[0])),
    "resume nobody": (KvtideError, lambda m, r: m.resume(7)),
    "resume out of range": (KvtideError, lambda m, r: m.resume(99)),
    "release nobody": (KvtideError, lambda m, r: m.release(7)),
    "release out of range": (KvtideError, lambda m, r: m.release(-1)),
    "name in use": (ConfigError, lambda m, r: m.admit("a", [1, 2])),
    "empty prompt": (ConfigError, lambda m, r: m.admit("x", [])),
    "prompt too long": (ConfigError, lambda m, r: m.admit("x", [1] * 65)),
    "prompt of floats": (ConfigError, lambda m, r: m.admit("x", [1.5])),
    "prompt of two rows": (ConfigError, lambda m, r: m.admit("x", [[1], [2]])),
    "prompt of bools": (ConfigError, lambda m, r: m.admit("x", np.array([True, False]))),
    "priority": (ConfigError, lambda m, r: m.admit("x", [1], priority=4)),
    "image tokens": (ConfigError, lambda m, r: m.admit("x", [1], image_tokens=-1)),
    "item behind the prompt": (ConfigError, lambda m, r: m.admit("x", [1, 2], items=[Item(2, b"")])),
    "unknown group": (KvtideError, lambda m, r: m.group("nothing")),
    "unknown request": (KvtideError, lambda m, r: m.row_of("nobody")),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_call_changes_nothing(case: str) -> None:
    error, call = WRONG[case]
    m, rows = busy()
    before = fingerprint(m)
    with pytest.raises(error):
        call(m, rows)
    assert fingerprint(m) == before
    m.check()


@pytest.mark.parametrize(
    ("layout", "memory", "options", "message"),
    [
        ("gemma-3-27b", "1GiB", {}, "layout 'gemma-3-27b' is a str; it must be a ModelLayout"),
        (None, "1MiB", {}, "memory of 1048576 bytes does not hold one page of"),
        (None, "abc", {}, "'abc' is not a size"),
        (None, "1GiB", {"lookahead": -1}, "lookahead -1 must be at least 0"),
        (None, "1GiB", {"max_requests": 0}, "max_requests 0 must be at least 1"),
    ],
)
def test_a_manager_that_cannot_be_is_named(layout: Any, memory: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HybridMemoryManager(layout or ModelLayout.preset("gemma-3-27b"), memory, **options)


def test_third_step_in_flight_changes_nothing() -> None:
    m, rows = busy()
    m.reserve(rows[:1], [1])
    before = fingerprint(m)
    with pytest.raises(KvtideError, match="2 steps are in flight"):
        m.reserve(rows[:1], [1])
    assert fingerprint(m) == before


def test_commit_without_a_step_changes_nothing() -> None:
    m, rows = busy()
    m.commit(rows[:2], [1, 1], [5, 6])
    before = fingerprint(m)
    with pytest.raises(KvtideError, match="no step"):
        m.commit(rows[:2], [1, 1], [5, 6])
    assert fingerprint(m) == before


def test_no_row_is_left() -> None:
    m = manager(geometry((FULL, 4)), 12, max_requests=2)
    cache(m, tokens(9))
    m.admit("a", tokens(9))
    m.admit("b", tokens(9))
    before = fingerprint(m)
    with pytest.raises(Exhausted, match="2 rows"):
        m.admit("c", tokens(9))
    assert fingerprint(m) == before


def test_row_that_would_outgrow_the_model_changes_nothing() -> None:
    m = manager(geometry((FULL, 4)), 30, max_model_len=20)
    row = compute(m, "r", tokens(18))
    before = fingerprint(m)
    with pytest.raises(KvtideError, match="max_model_len is 20"):
        m.reserve([row], [3])
    assert fingerprint(m) == before


def test_double_release_is_impossible() -> None:
    m = manager(geometry((FULL, 4)), 12)
    row = compute(m, "r", tokens(9))
    block = int(np.flatnonzero(m.pool.refs)[0])
    m.release(row)
    before = fingerprint(m)
    with pytest.raises(KvtideError, match=f"row {row} holds no request"):
        m.release(row)
    with pytest.raises(KvtideError, match="no reference left"):
        m.pool.release(np.array([block]), 0)
    assert fingerprint(m) == before


# -- what the search for bugs has found -------------------------------------------------------------------------------


def test_slot_of_an_earlier_owner_of_a_page_is_not_taken() -> None:
    """A page of six small blocks becomes one of one large block: the five free small ones are no more."""
    m = manager(geometry((FullAttention(1, 3, 3), 4), (window(4), 2)), 3)
    small, large = m.group("sliding_window").number, m.group("full_attention").number
    needs = [0, 0]
    needs[small] = 1
    first = m.pool.take(needs)[small]
    m.pool.release(first, 0)
    needs = [0, 0]
    needs[large] = 3
    m.pool.release(m.pool.take(needs)[large][1:], 0)
    needs = [0, 0]
    needs[small] = 1
    assert m.pool.take(needs)[small][0] // m.pool.stride != first[0] // m.pool.stride
    m.pool.check()


def test_sink_blocks_go_to_the_rows_that_grow_by_them() -> None:
    """Four rows take 1, 2, 0 and 1 sink blocks: as many blocks as rows, but not one each."""
    m = manager(geometry((SinkWindow(1, 1, 1, window=4, sinks=12), 4)), 40)
    rows = [m.admit(str(i), tokens(40, seed=i)).row for i in range(4)]
    m.reserve([rows[2], rows[3]], [12, 8])
    m.commit([rows[2], rows[3]], [12, 8])
    m.reserve(rows, [4, 8, 4, 4])
    assert [blocks(m, "sink_window", row) for row in rows] == [[0], [0, 1], [0, 1, 2, 3], [0, 1, 2]]
    m.check()


def test_group_leaves_the_last_page_to_the_one_that_needs_it() -> None:
    """A block is left in an active page of its group, but cached: it must be evicted, and no page claimed instead."""
    cut = geometry((FullAttention(1, 3, 3), 4), (window(4), 3))
    evicted: list[int] = []
    pool = PagePool(cut, 3, lambda ids: evicted.extend(ids.tolist()))
    small = pool.take([0, pool.per_page[1]])[1]
    pool.set_cached(small[:1])
    pool.release(small[:1], 4)
    assert pool.pages_short([2, 1]) == 0
    assert [len(ids) for ids in pool.take([1, 1])] == [1, 1]
    assert not evicted
    pool.check()
    pool = PagePool(cut, 3, lambda ids: evicted.extend(ids.tolist()))
    small = pool.take([0, pool.per_page[1]])[1]
    pool.set_cached(small[:1])
    pool.release(small[:1], 4)
    taken = pool.take([2, 1])
    assert (len(taken[0]), taken[1].tolist(), evicted) == (2, [small[0]], [small[0]])
    pool.check()


def test_second_step_in_flight_does_not_restore_the_checkpoint_again() -> None:
    m = manager(geometry((FULL, 4), (state(), 0)), 40)
    row = compute(m, "r", tokens(8))
    assert len(m.checkpoint(row)) == 1
    m.release(row)
    row = m.admit("same", tokens(20)).row
    assert int(m.committed[row]) == 8
    assert len(m.reserve([row], [4]).copies) == 1
    assert m.reserve([row], [4]).copies == []
    m.commit([row], [4])
    m.commit([row], [4])
    m.check()


def test_checkpoints_of_two_states_do_not_evict_each_other() -> None:
    """All pages but two hold a checkpoint of higher priority; the new ones, of the lowest, need one page each."""
    m = manager(geometry((state(1), 0), (state(2), 0)), 8)
    row = compute(m, "first", tokens(16), priority=3)
    assert len(m.checkpoint(row)) == 2
    m.release(row)
    row = compute(m, "second", tokens(16, seed=1), priority=3)
    assert len(m.checkpoint(row)) == 2
    m.release(row)
    running = m.admit("third", tokens(20, seed=2), priority=-3).row
    step(m, running, 16)
    copies = m.checkpoint(running)
    destinations = [(int(copy.destination[0]) * m.geometry.unit // m.geometry.page_bytes) for copy in copies]
    assert len(destinations) == len(set(destinations)) == 2
    m.check()
    m.release(running)
    assert hit(m, tokens(20, seed=2)) == 16


def test_checkpoint_that_is_there_evicts_nothing() -> None:
    m = manager(geometry((state(1), 0)), 3)
    cache(m, tokens(1))
    row = compute(m, "a", tokens(17)[:16])
    assert len(m.checkpoint(row)) == 1
    other = compute(m, "b", tokens(16))
    assert m.checkpoint(other) == []
    assert m.pool.counts(0).evictable == 1


def test_state_after_a_rejection_that_was_not_kept_is_refused() -> None:
    m = manager(geometry((FULL, 4), (state(), 0)), 40, lookahead=2)
    row = m.admit("r", tokens(12)).row
    for count, accepted in ((5, 3), (5, 0), (3, 0)):
        m.reserve([row], [count])
        before = fingerprint(m)
        with pytest.raises(KvtideError, match="recurrent state"):
            m.commit([row], [accepted])
        assert fingerprint(m) == before
        m.preempt(row)
        m.commit([], [])
        m.resume(row)
    m.reserve([row], [3])
    m.commit([row], [2])
    m.check()


def test_item_in_the_last_partial_block_of_a_prompt_enters_its_key() -> None:
    m = manager(geometry((FULL, 4)), 40)
    prompt, more = tokens(6), [7, 8, 9]
    for name, item in (("cat", Item(5, b"cat")), ("dog", Item(5, b"dog"))):
        row = compute(m, name, prompt, items=[item])
        step(m, row, 3, more)
        m.release(row)
    longer = [*prompt.tolist(), *more, 1]
    assert hit(m, longer, items=[Item(5, b"cat")]) == 8
    assert hit(m, longer, items=[Item(5, b"dog")]) == 8
    assert hit(m, longer) == 4


def test_rejected_drafts_bring_back_only_tokens_that_have_slots() -> None:
    """Drafts are rejected after a second step has skipped what would be out of reach with them."""
    m = manager(geometry((window(3), 1)), 60, max_model_len=64)
    row = m.admit("r", tokens(30)).row
    m.reserve([row], [8], num_drafts=[7])
    m.reserve([row], [6], kv_from_activations=True)
    m.commit([row], [1])
    m.commit([row], [6])
    assert int(m.committed[row]) == 7
    assert blocks(m, "sliding_window", row)[:2] == [5, 6]
    plan = m.reserve([row], [2])
    assert (m.slots(plan, "sliding_window") >= 0).all()


def test_only_drafts_can_be_rejected_once_tokens_had_no_slot() -> None:
    m = manager(geometry((window(3), 1)), 60, max_model_len=64)
    row = m.admit("r", tokens(40)).row
    m.reserve([row], [12], num_drafts=[2])
    m.reserve([row], [12], num_drafts=[2], kv_from_activations=True)
    before = fingerprint(m)
    with pytest.raises(KvtideError, match="no drafts"):
        m.commit([row], [9])
    assert fingerprint(m) == before
    m.commit([row], [10])
    with pytest.raises(KvtideError, match="no drafts"):
        m.commit([row], [9])
    m.commit([row], [10])
    m.check()


def test_rows_with_dead_tokens_only_are_named_as_changed() -> None:
    m = manager(geometry((ChunkedLocal(1, 1, 1, chunk=4), 4)), 20)
    row = m.admit("r", tokens(20)).row
    step(m, row, 4)
    plan = m.reserve([row], [4], kv_from_activations=True)
    assert used(m) == 0
    assert plan.changed["chunked_local"].tolist() == [row]
    m.commit([row], [4])
    m.check()


def test_engine_may_reuse_its_arrays_while_a_step_is_in_flight() -> None:
    m = manager(geometry((FULL, 4)), 20)
    rows = np.array([m.admit("a", tokens(8)).row, m.admit("b", tokens(8, seed=1)).row])
    counts = np.array([4, 4])
    mine = rows.copy()
    m.reserve(rows, counts)
    rows[:], counts[:] = 0, 1
    m.commit(mine, [4, 4])
    m.check()


def test_cross_attention_may_have_any_block_size() -> None:
    m = manager(geometry((FULL, 4), (CrossAttention(1, 1, 1), 6)), 40)
    image = [Item(0, b"an image")]
    cache(m, tokens(8), image_tokens=13, items=image)
    row = m.admit("r", tokens(9), image_tokens=13, items=image).row
    assert int(m.committed[row]) == 8
    step(m, row, 1)
    assert blocks(m, "cross_attention", row) == [0, 1, 2]


def test_engine_of_the_oracle_sees_a_manager_that_hands_out_a_block_twice() -> None:
    """The harness is worth its time: a pool that lies is found."""
    engine = Engine(geometry((FULL, 4)), 20, max_requests=3)
    engine.admit("a", [1] * 9)
    engine.admit("b", [0] * 9)
    engine.reserve(["a"], [8])
    taken = engine.manager.pool.take
    first = np.flatnonzero(engine.manager.pool.refs)
    engine.manager.pool.take = lambda needs: [first[: needs[0]]]  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        engine.reserve(["b"], [8])
    engine.manager.pool.take = taken  # type: ignore[method-assign]


def test_prompts_whose_images_are_not_named_share_nothing() -> None:
    """The text's keys and values depend on the image that cross attention reads."""
    m = manager(geometry((FULL, 4), (CrossAttention(1, 1, 1), 4)), 40)
    cache(m, tokens(8), image_tokens=4)
    assert m.admit("same text, who knows which image", tokens(9), image_tokens=4).num_cached_tokens == 0
    row = m.admit("no image", tokens(9)).row
    assert int(m.committed[row]) == 0


def test_unpinned_prefix_loses_its_tail_before_its_head() -> None:
    m = manager(geometry((FULL, 4)), 4)
    cache(m, tokens(12))
    m.unpin(m.pin(tokens(12)))
    step(m, m.admit("other", tokens(9, seed=1)).row, 8)
    assert hit(m, tokens(13)) == 8


def test_a_block_released_twice_in_one_call_is_refused_and_changes_nothing() -> None:
    m = manager(geometry((FULL, 4)), 4)
    (ids,) = m.pool.take([1])
    before = fingerprint(m)
    with pytest.raises(KvtideError, match="no reference left"):
        m.pool.release(np.repeat(ids, 2), 4)
    assert fingerprint(m) == before


@pytest.mark.parametrize("rows", [[0.9], ["a"], [True]])
def test_rows_and_counts_are_whole_numbers(rows: list[object]) -> None:
    m = manager(geometry((FULL, 4)), 4)
    m.admit("r", tokens(8))
    with pytest.raises(KvtideError, match="whole numbers"):
        m.reserve(rows, [1])
    with pytest.raises(KvtideError, match="whole numbers"):
        m.reserve([0], [1.7])


def test_abort_by_name_at_every_stage() -> None:
    m = manager(geometry((FULL, 4), (window(8), 4)), 40)
    free = m.pool.free_pages
    m.admit("waiting", tokens(9))
    m.abort("waiting")
    row = m.admit("in flight", tokens(9, seed=1)).row
    m.reserve([row], [8])
    m.abort("in flight")
    assert m.pool.free_pages < free
    m.commit([], [])
    assert m.pool.free_pages == free
    row = m.admit("preempted", tokens(9, seed=2)).row
    m.preempt(row)
    m.abort("preempted")
    with pytest.raises(KvtideError, match="'preempted' is not admitted"):
        m.abort("preempted")
    m.check()
