"""What each of vLLM's KV cache groups needs for a sequence of a given length, and how long a hit a store can serve.

    full attention     every block                                         [0 1 2 3 4 5 6 7|
    sliding window     the last blocks that the next token still sees      [. . . . . 5 6 7|   boundary: a hit's end
    chunked attention  the blocks of the chunk that the next token is in   [. . . . . . 6 7|
    recurrent state    the block that holds the state at the very end      [. . . . . . . 7|

A hit ends on a multiple of `alignment` (every group's block ends there), and every group must have what it needs for
that very length. vLLM's specs are recognised by the names of their classes: no import of vLLM is needed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from kvtide.kvcache import ConfigError
from kvtide.offload.keys import CHAIN_BYTES, StoreKey, store_key
from kvtide.offload.store import Lease, Status

_FULL = {"FullAttentionSpec", "MLAAttentionSpec"}
_WINDOW = {"SlidingWindowSpec", "SlidingWindowMLASpec"}
_CHUNK = {"ChunkedLocalAttentionSpec"}
_STATE = {"MambaSpec"}
_FIRST_PROBE = 32


@dataclass(frozen=True)
class Group:
    """One group: its number in vLLM's list, its tokens a block, and its window or chunk in tokens, if it has one.

    A block of a group with `is_state` holds the state at the block's end, and is there only where vLLM has kept one.
    """

    index: int
    block_size: int
    window: int | None = None
    chunk: int | None = None
    is_state: bool = False

    @property
    def is_full(self) -> bool:
        """Whether every block is needed."""
        return self.window is None and self.chunk is None and not self.is_state

    @property
    def reach(self) -> int:
        """Tokens back from the end of a hit that it needs, where it does not need all; 0 for full attention."""
        return self.block_size if self.is_state else self.window or self.chunk or 0

    def first_block(self, num_tokens: int) -> int:
        """The first block that a sequence of `num_tokens` computed tokens still needs for its next token."""
        if self.is_state:
            return max(0, num_tokens - 1) // self.block_size
        if self.window is not None:
            return max(0, num_tokens - self.window + 1) // self.block_size
        if self.chunk is not None:
            return num_tokens // self.chunk * self.chunk // self.block_size
        return 0


def read_groups(kv_cache_config: Any) -> list[Group]:
    """The groups whose blocks a store can hold; `ConfigError` for a kind whose state cannot be carried."""
    groups = []
    for index in kv_cache_config.prefix_cacheable_group_ids:
        group = kv_cache_config.kv_cache_groups[index]
        spec = layer_spec(group.kv_cache_spec)
        kind = type(spec).__name__
        if kind in _FULL:
            groups.append(Group(index, spec.block_size))
        elif kind in _WINDOW:
            window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
            groups.append(Group(index, spec.block_size, window=window))
        elif kind in _CHUNK:
            groups.append(Group(index, spec.block_size, chunk=spec.attention_chunk_size))
        elif kind in _STATE:
            groups.append(_state_group(index, spec))
        else:
            raise ConfigError(
                f"KvtideConnector cannot carry KV cache group {index} ({kind}, {len(group.layer_names)} layers); it "
                f"carries {', '.join(sorted(_FULL | _WINDOW | _CHUNK | _STATE))}"
            )
    if not groups:
        raise ConfigError("KvtideConnector has nothing to carry: no KV cache group can be cached by its prefix")
    return groups


def _state_group(index: int, spec: Any) -> Group:
    mode = getattr(spec, "mamba_cache_mode", None)
    if mode != "align":
        raise ConfigError(
            "KvtideConnector needs --mamba-cache-mode align, with which vLLM keeps states at the ends of blocks; "
            f"KV cache group {index} has {mode!r}"
        )
    if getattr(spec, "num_speculative_blocks", 0):
        raise ConfigError(
            f"KvtideConnector cannot carry the states of KV cache group {index} with speculative decoding"
        )
    return Group(index, spec.block_size, is_state=True)


def layer_spec(spec: Any) -> Any:
    """The spec that stands for a group's: of layers of one type but several sizes, the first's."""
    inner = getattr(spec, "kv_cache_specs", None)
    return next(iter(inner.values())) if inner else spec


def alignment(groups: Sequence[Group]) -> int:
    """Where hits may end, in tokens."""
    return lcm(*(group.block_size for group in groups))


class Hit:
    """How far a store can serve a prompt.

    `end` is the longest length, in tokens, that all groups can serve from `start` on (0: none); `run` is how far the
    groups of full attention alone would reach, which is where windows are worth storing. `close` lets the values go.
    """

    def __init__(self) -> None:
        self.end = 0
        self.run = 0
        self._leases: list[Lease] = []

    def close(self) -> None:
        """Let the values be evicted again."""
        while self._leases:
            self._leases.pop().close()


def find_hit(
    lease: Callable[[list[StoreKey]], Lease],
    contains: Callable[[list[StoreKey]], list[Status]],
    groups: Sequence[tuple[Group, bytes]],
    chains: dict[int, bytes],
    start: int,
    limit: int,
) -> Hit:
    """The longest hit between `start` (what the device has) and `limit`, both in tokens and aligned; values are held.

    `groups` come with the space of their keys; `chains[block_size]` are the chain hashes of all blocks up to `limit`.
    The full-attention groups are asked in growing steps and no further than the first gap; of the windows only the
    blocks before a boundary that is still possible.
    """
    hit = Hit()
    step = alignment([group for group, _ in groups])
    try:
        hit.run = limit
        for group, space in groups:
            if group.is_full:
                hit.run = min(hit.run, _run(hit, lease, group, _keys(group, space, chains, start, hit.run), start))
        hit.run = hit.run // step * step
        end = hit.run
        while end > start:
            missing = end
            for group, space in groups:
                if not group.is_full:
                    first = max(start // group.block_size, group.first_block(end))
                    found = contains(_keys(group, space, chains, first * group.block_size, end))
                    if any(status is not Status.HIT for status in found):
                        gap = next(at for at, status in enumerate(found) if status is not Status.HIT)
                        # Every shorter length that still has this block in its window lacks it too.
                        missing = min(missing, (first + gap) * group.block_size)
            if missing == end and _hold_windows(hit, lease, groups, chains, start, end):
                hit.end = end
                break
            end = (missing if missing < end else end - 1) // step * step
    except BaseException:
        hit.close()
        raise
    if hit.end == 0:
        hit.close()
    return hit


def prefix_keys(
    groups: Sequence[tuple[Group, bytes]], chains: dict[int, bytes], length: int, ends: Sequence[int]
) -> list[StoreKey]:
    """The keys of all that a prefix of `length` tokens stands on, by where each block ends; windows only at `ends`."""
    found: dict[StoreKey, int] = {}
    for group, space in groups:
        size = group.block_size
        starts = [(0, length)] if group.is_full else [(group.first_block(end) * size, end) for end in ends]
        for start, end in starts:
            for number, key in enumerate(_keys(group, space, chains, start, end), start // size + 1):
                found[key] = number * size
    return sorted(found, key=found.__getitem__)


def _run(hit: Hit, lease: Callable[[list[StoreKey]], Lease], group: Group, keys: list[StoreKey], start: int) -> int:
    """Tokens up to which a full-attention group has every block from `start` on."""
    at, size = 0, _FIRST_PROBE
    while at < len(keys):
        held = lease(keys[at : at + size])
        hit._leases.append(held)
        found = next((n for n, status in enumerate(held.statuses) if status is not Status.HIT), len(held.statuses))
        at += found
        if found < len(held.statuses):
            break
        size *= 2
    return start + at * group.block_size


def _hold_windows(
    hit: Hit,
    lease: Callable[[list[StoreKey]], Lease],
    groups: Sequence[tuple[Group, bytes]],
    chains: dict[int, bytes],
    start: int,
    end: int,
) -> bool:
    """Whether all window blocks of a length could be held; they were there a moment ago."""
    for group, space in groups:
        if not group.is_full:
            first = max(start // group.block_size, group.first_block(end))
            held = lease(_keys(group, space, chains, first * group.block_size, end))
            hit._leases.append(held)
            if any(status is not Status.HIT for status in held.statuses):
                return False
    return True


def _keys(group: Group, space: bytes, chains: dict[int, bytes], start: int, end: int) -> list[StoreKey]:
    """The keys of a group's blocks between two lengths in tokens."""
    joined, size = chains[group.block_size], CHAIN_BYTES
    blocks = range(start // group.block_size, end // group.block_size)
    return [store_key(space, joined[at * size : (at + 1) * size]) for at in blocks]
