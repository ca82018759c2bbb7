"""Whole blocks of a decoding row are put under their keys late: never so late that anybody notices."""

from __future__ import annotations

import numpy as np
import pytest
from layouts import layout_of

from kvtide.hma import BlockStored, HybridMemoryManager
from kvtide.hma.hashing import KeyChain
from kvtide.hma.sequences import HASH_AHEAD
from kvtide.hma.waiting import MOST_WAITING
from kvtide.kvcache import FullAttention, SlidingWindow
from kvtide.kvcache.geometry import BlockFormat, PageGeometry
from kvtide.kvcache.layout import ModelLayout

FULL = layout_of("full", (1, FullAttention(1, 8, 8)))
WINDOW = layout_of("hybrid", (1, FullAttention(1, 8, 8)), (1, SlidingWindow(1, 8, 8, window=20)))
BASE = 4


def manager_of(layout: ModelLayout, pages: int = 4000, **options: object) -> HybridMemoryManager:
    formats = []
    for group in layout.groups:
        size = BASE * group.spec.bytes_per_token
        formats.append(BlockFormat(group, BASE, 1, size, page_bytes=size))
    geometry = PageGeometry("by hand", layout, formats[0].page_bytes, tuple(formats))
    options = {"max_requests": 4, "max_model_len": 4000, **options}
    return HybridMemoryManager(geometry, pages * geometry.page_bytes, **options)  # type: ignore[arg-type]


def start(manager: HybridMemoryManager, name: str, prompt: list[int]) -> int:
    """A row with its prompt computed."""
    row, done, _ = manager.admit(name, prompt)
    manager.reserve([row], [len(prompt) - done])
    manager.commit([row], [len(prompt) - done])
    return row


def decode(manager: HybridMemoryManager, row: int, tokens: list[int], *, at_once: int = 1) -> None:
    for begin in range(0, len(tokens), at_once):
        some = tokens[begin : begin + at_once]
        manager.reserve([row], [len(some)])
        manager.commit([row], [len(some)], some)


def num_cached(manager: HybridMemoryManager) -> int:
    manager.check()
    return int(manager.pool.cached.sum())


def hit(manager: HybridMemoryManager, tokens: list[int]) -> int:
    """What a look-up finds, without a trace of it."""
    pin = manager.pin(tokens)
    manager.unpin(pin)
    return pin.num_tokens


def test_decoded_blocks_wait_for_a_look_up_that_comes_by() -> None:
    manager = manager_of(FULL)
    row = start(manager, "a", [1] * 8)
    decode(manager, row, [2] * 9)
    assert num_cached(manager) == 2
    assert hit(manager, [3] * 8) == 0
    assert hit(manager, [1] * 4 + [3] * 4) == 4
    assert num_cached(manager) == 2
    assert hit(manager, [1] * 8 + [2] * 8) == 16
    assert num_cached(manager) == 4


def test_a_look_up_goes_from_one_waiting_row_to_the_next() -> None:
    manager = manager_of(FULL)
    first = start(manager, "a", [1] * 4)
    decode(manager, first, [2] * 4)
    second = start(manager, "b", [1] * 4 + [2] * 4)  # finds what the first row has, and goes on
    decode(manager, second, [3] * 4)
    decode(manager, first, [2] * 4)
    assert hit(manager, [1] * 4 + [2] * 4 + [3] * 4) == 12
    assert hit(manager, [1] * 4 + [2] * 8) == 12


@pytest.mark.parametrize("leave", ["preempt", "release"])
def test_what_waits_is_cached_when_the_row_leaves(leave: str) -> None:
    manager = manager_of(FULL)
    row = start(manager, "a", [1] * 8)
    decode(manager, row, [2] * 9)
    getattr(manager, leave)(row)
    assert num_cached(manager) == 4
    assert hit(manager, [1] * 8 + [2] * 9) == 16


def test_a_window_does_not_let_go_of_a_block_before_it_has_its_key() -> None:
    manager = manager_of(WINDOW)
    row = start(manager, "a", [1] * 8)
    decode(manager, row, list(range(2, 60)))
    sequence = [1] * 8 + list(range(2, 60))
    table = manager.tables["sliding_window"]
    assert table.first[row] > 8  # decoded blocks have left the window
    assert hit(manager, sequence[: 7 * BASE]) == 7 * BASE


def test_at_most_so_many_blocks_wait() -> None:
    manager = manager_of(FULL)
    row = start(manager, "a", [1] * 4)
    for _ in range(3 * MOST_WAITING):
        decode(manager, row, [2] * BASE, at_once=BASE)
        whole = int(manager.committed[row]) // BASE
        assert 0 <= whole - num_cached(manager) < MOST_WAITING


def test_the_engine_can_have_it_done_when_it_is_idle() -> None:
    manager = manager_of(FULL)
    row = start(manager, "a", [1] * 4)
    decode(manager, row, [2] * 8)
    assert num_cached(manager) == 1
    manager.catch_up()
    assert num_cached(manager) == 3


def test_a_row_whose_last_key_was_forgotten_is_found_all_the_same() -> None:
    """Two rows compute one prefix, and its blocks are the first row's. That one goes, and its blocks are reused."""
    manager = manager_of(FULL, pages=8)
    first, second = manager.admit("a", [1] * 4).row, manager.admit("b", [1] * 4).row
    manager.reserve([first, second], [4, 4])
    manager.commit([first, second], [4, 4])
    keeper, other = (
        (first, second)
        if manager.pool.cached[manager.group("full_attention").table.ids_of(first)].all()
        else (second, first)
    )
    decode(manager, other, [2] * 4)
    manager.release(keeper)
    assert num_cached(manager) == 1
    filler = start(manager, "c", [5] * 24)
    assert hit(manager, [1] * 4) == 0  # evicted; the other row's copy has no key
    manager.release(filler)
    start(manager, "d", [1] * 4)
    assert hit(manager, [1] * 4 + [2] * 4) == 8


def test_with_events_nothing_waits() -> None:
    manager = manager_of(FULL, events=True)
    row = start(manager, "a", [1] * 4)
    manager.take_events()
    decode(manager, row, [2] * 4)
    (event,) = manager.take_events()
    assert isinstance(event, BlockStored)
    assert event.token_ids == (2, 2, 2, 2)


@pytest.mark.parametrize("at_once", [1, 3, 7, HASH_AHEAD - 1, HASH_AHEAD + 5])
def test_keys_do_not_depend_on_when_tokens_are_hashed(at_once: int) -> None:
    manager = manager_of(FULL)
    prompt = np.random.default_rng(1).integers(0, 1000, 3000).tolist()
    row = start(manager, "a", prompt[:10])
    decode(manager, row, prompt[10:2010], at_once=at_once)
    keys = manager.keys(row, 0, 2010 // BASE)
    decode(manager, row, prompt[2010:], at_once=at_once)
    assert manager.keys(row, 0, 2010 // BASE) == keys
    other = manager.admit("b", prompt).row
    assert manager.committed[other] == 2996
    assert manager.keys(row, 0, 750) == manager.keys(other, 0, 750)
    chain = KeyChain(BASE, b"", np.array(prompt, dtype="<i4").tobytes())
    assert len(chain.keys) == len(set(keys) | set(manager.keys(row, 502, 750)))


def test_rows_that_hash_at_once_and_rows_that_wait_mix_in_one_step() -> None:
    manager = manager_of(FULL)
    rows = [start(manager, name, [number] * 4) for number, name in enumerate("abc")]
    counts, tokens = [HASH_AHEAD - 10, 5, 30], np.random.default_rng(2).integers(0, 99, 3000).tolist()
    expected: list[list[int]] = [[number] * 4 for number in range(3)]
    for _ in range(5):
        ids = []
        for number, count in enumerate(counts):
            new, tokens = tokens[:count], tokens[count:]
            expected[number] += new
            ids += new
        manager.reserve(rows, counts)
        manager.commit(rows, counts, ids)
    for row, sequence in zip(rows, expected, strict=True):
        whole = len(sequence) // BASE
        keys = manager.keys(row, 0, whole)
        name = f"again {row}"
        manager.release(row)
        again = manager.admit(name, sequence).row
        assert manager.committed[again] == (len(sequence) - 1) // BASE * BASE
        assert manager.keys(again, 0, whole) == keys
        manager.release(again)
