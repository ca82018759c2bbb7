"""Hits over groups with windows, chunks and states, against brute force; no vLLM needed."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.connectors.vllm_bridge.groups import Group, alignment, find_hit, read_groups
from kvtide.kvcache import ConfigError
from kvtide.offload.keys import CHAIN_BYTES, SPACE_BYTES, StoreKey
from kvtide.offload.store import Lease, Status

GROUPS = [
    Group(0, 4),
    Group(1, 8),
    Group(2, 4, window=10),
    Group(3, 8, window=17),
    Group(4, 4, chunk=12),
    Group(5, 8, is_state=True),
]


def key(group: Group, block: int) -> StoreKey:
    return bytes([group.index]) * SPACE_BYTES + block.to_bytes(CHAIN_BYTES, "little")


class Held(Lease):
    opened = 0

    def __init__(self, statuses: list[Status]) -> None:
        super().__init__(statuses)
        self._open = True
        Held.opened += 1

    def close(self) -> None:
        Held.opened -= self._open
        self._open = False


@st.composite
def stores(draw: st.DrawFn) -> tuple[list[Group], set[StoreKey], int, int]:
    groups = draw(st.lists(st.sampled_from(GROUPS), min_size=1, unique=True))
    step = alignment(groups)
    limit = step * draw(st.integers(1, 40 // step * 2))
    start = step * draw(st.integers(0, limit // step - 1))
    holes = draw(st.sets(st.tuples(st.sampled_from(groups), st.integers(0, limit // 4)), max_size=12))
    there = {key(g, b) for g in groups for b in range(limit // g.block_size) if (g, b) not in holes}
    return groups, there, start, limit


@given(stores())
def test_longest_hit(case: tuple[list[Group], set[StoreKey], int, int]) -> None:
    groups, there, start, limit = case
    step = alignment(groups)
    chains = {
        size: b"".join(block.to_bytes(CHAIN_BYTES, "little") for block in range(limit // size)) for size in (4, 8)
    }

    def statuses(keys: list[StoreKey]) -> list[Status]:
        return [Status.HIT if one in there else Status.MISS for one in keys]

    def sees(group: Group, block: int, end: int) -> bool:  # by tokens, not by the formula under test
        for token in range(block * group.block_size, (block + 1) * group.block_size):
            if group.is_state and token == end - 1:
                return True
            if group.window is not None and token > end - group.window:
                return True
            if group.chunk is not None and token // group.chunk == end // group.chunk:
                return True
        return group.is_full

    def serves(end: int) -> bool:
        return all(
            key(g, b) in there
            for g in groups
            for b in range(start // g.block_size, end // g.block_size)
            if sees(g, b, end)
        )

    Held.opened = 0
    hit = find_hit(
        lambda keys: Held(statuses(keys)),
        statuses,
        [(group, bytes([group.index]) * SPACE_BYTES) for group in groups],
        chains,
        start,
        limit,
    )
    assert hit.end == max((end for end in range(start + step, limit + 1, step) if serves(end)), default=0)
    hit.close()
    assert Held.opened == 0


@dataclass
class MambaSpec:
    mamba_cache_mode: str = "align"
    num_speculative_blocks: int = 0
    block_size: int = 16


class CrossAttentionSpec:
    block_size = 16


def config(spec: object) -> object:
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a"])
    return SimpleNamespace(prefix_cacheable_group_ids=(0,), kv_cache_groups=(group,))


def test_states_are_carried_where_vllm_keeps_them() -> None:
    assert read_groups(config(MambaSpec())) == [Group(0, 16, is_state=True)]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (MambaSpec(mamba_cache_mode="none"), "--mamba-cache-mode align.*group 0 has 'none'"),
        (MambaSpec(num_speculative_blocks=1), "group 0 with speculative decoding"),
        (CrossAttentionSpec(), r"group 0 \(CrossAttentionSpec, 1 layers\)"),
    ],
)
def test_what_cannot_be_carried_is_refused(spec: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_groups(config(spec))
