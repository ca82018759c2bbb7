"""What a memory manager consists of, and everything about it that can be asked without changing it.

The calls that change it lie on top, one subject a file: requests come and go (`requests`), steps (`stepping`), tokens
that are loaded instead of computed (`lower_tiers`), and, in `manager`, what its users steer in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvtide.kvcache import ConfigError, Exhausted, KvtideError, ModelLayout
from kvtide.kvcache.geometry import PageGeometry
from kvtide.kvcache.sizes import parse_bytes
from kvtide.kvcache.solver import solve_geometry
from kvtide.kvcache.specs import Int64Array

from .accounting import MemoryByCause, account
from .cache import PrefixCache
from .drafts import DraftAccounting
from .groups import ManagedGroup, base_block, make_groups
from .hashing import namespace
from .loads import Load
from .pool import PagePool
from .sequences import Sequences
from .steps import MAX_DRAFTS, StepQueue
from .tables import GroupTable


class ManagerCore:
    """State of one rank's manager; the arguments are those of `HybridMemoryManager`."""

    def __init__(
        self,
        layout: ModelLayout | PageGeometry,
        memory: int | str,
        *,
        max_requests: int = 1024,
        max_model_len: int | None = None,
        max_step_tokens: int = 8192,
        max_steps_in_flight: int = 2,
        lookahead: int = 0,
        prefix_caching: bool = True,
        drop_last_block: bool = False,
        model_id: str = "",
        hash_key: bytes = b"",
        key_space: bytes | None = None,
        events: bool = False,
        pin_memory: bool = False,
    ) -> None:
        if not isinstance(layout, ModelLayout | PageGeometry):
            raise ConfigError(
                f"layout {str(layout)[:80]!r} is a {type(layout).__name__}; it must be a ModelLayout, such as "
                "ModelLayout.preset('gemma-3-27b'), or a PageGeometry"
            )
        geometry = layout if isinstance(layout, PageGeometry) else solve_geometry(layout)
        limit = max_model_len or geometry.layout.max_model_len
        if limit is None:
            raise ConfigError(f"the layout of {geometry.layout.name} names no longest sequence; give max_model_len")
        for name, value, low in (
            ("max_requests", max_requests, 1),
            ("max_model_len", limit, 1),
            ("max_step_tokens", max_step_tokens, 1),
            ("max_steps_in_flight", max_steps_in_flight, 1),
            ("lookahead", lookahead, 0),
        ):
            if value < low:
                raise ConfigError(f"{name} {value} must be at least {low}")
        if geometry.one_table:
            raise ConfigError(f"the {geometry.policy} geometry shares one table among groups; it cannot be managed")
        num_bytes = parse_bytes(memory)
        num_pages = num_bytes // geometry.page_bytes
        if not num_pages:
            raise ConfigError(f"memory of {num_bytes} bytes does not hold one page of {geometry.page_bytes} bytes")
        geometry.check_arena(num_pages * geometry.page_bytes)

        self.geometry = geometry
        self.max_requests = max_requests
        self.max_model_len = limit
        self.max_step_tokens = max_step_tokens
        self.max_steps_in_flight = max_steps_in_flight
        self.lookahead = lookahead
        self.drop_last_block = drop_last_block
        self.drafts = DraftAccounting(MAX_DRAFTS)
        self.base = base_block(geometry)
        self.pool = PagePool(geometry, num_pages, lambda ids: self._cache.reclaimed(ids))
        self.groups = make_groups(
            geometry,
            base=self.base,
            stride=self.pool.stride,
            max_requests=max_requests,
            max_tokens=limit,
            max_new_tokens=max_step_tokens * max_steps_in_flight,
            lookahead=lookahead,
            pin_memory=pin_memory,
        )
        self.committed = np.zeros(max_requests, dtype=np.int64)
        self.image_tokens = np.zeros(max_requests, dtype=np.int64)
        layers = repr([(f.group.name, f.group.spec, f.block_size) for f in geometry.formats])
        self._space = namespace(model_id, layers if key_space is None else key_space, hash_key)
        self._steps = StepQueue(max_requests, max_steps_in_flight)
        self._sequences = Sequences(max_requests, self.base, keep_tokens=events)
        self._cache = PrefixCache(
            self.pool,
            self.groups,
            self._sequences,
            enabled=prefix_caching,
            drop_last=drop_last_block,
            events=events,
        )
        self._states = [group for group in self.groups if group.is_state]
        self._row_of: dict[str, int] = {}
        self._request_of: list[str | None] = [None] * max_requests
        self._salt: list[str] = [""] * max_requests
        self._free_rows = list(range(max_requests - 1, -1, -1))
        self._class = np.zeros(max_requests, dtype=np.uint8)
        self._junction = np.zeros(max_requests, dtype=np.int64)
        # Per bounded group `[above or up to, span, row]`: dead blocks that end in one of two spans are worth keeping.
        self._useful = {
            group.number: np.zeros((2, 2, max_requests), dtype=np.int64) for group in self.groups if group.is_bounded
        }
        # Tokens that the blocks of every group have room for; a row that stays within needs nothing.
        self._covered = np.zeros(max_requests, dtype=np.int64)
        self._changed = np.zeros((len(self.groups), max_requests), dtype=np.bool_)
        self._loading: dict[int, Load] = {}
        # Checkpoints that a row's states are restored from, by row and group; they stay referenced until the commit.
        self._checkpoints: dict[int, dict[int, Int64Array]] = {}

    def stats(self) -> MemoryByCause:
        """Bytes of the pool by cause; they add up to the pool. Looks at everything: not for every step."""
        return account(self)

    @property
    def prefix_caching(self) -> bool:
        """Whether prefixes are cached."""
        return self._cache.enabled

    @property
    def tables(self) -> Mapping[str, GroupTable]:
        """Block tables by group name."""
        return {group.name: group.table for group in self.groups}

    @property
    def running_rows(self) -> Int64Array:
        """Rows that are running, ascending."""
        return np.flatnonzero(self._steps.running)

    @property
    def loading_rows(self) -> dict[int, int]:
        """Rows that are being loaded, and the tokens that each will have then."""
        return {row: load.num_tokens for row, load in self._loading.items()}

    @property
    def in_flight(self) -> Int64Array:
        """Tokens reserved and not yet committed, by row."""
        return self._steps.in_flight

    def group(self, name: str) -> ManagedGroup:
        """A group by name."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KvtideError(f"there is no group {name!r}; the layout has {[group.name for group in self.groups]}")

    def row_of(self, request_id: str) -> int:
        """The row of an admitted request."""
        try:
            return self._row_of[request_id]
        except KeyError:
            raise KvtideError(f"request {request_id!r} is not admitted") from None

    def num_tokens(self, row: int) -> int:
        """Tokens of a row's request that the manager knows: its prompt, and what was committed beyond it."""
        return int(self._sequences.known[row])

    def prompt_tokens(self, row: int) -> int:
        """Tokens of a row's prompt."""
        return int(self._sequences.prompt[row])

    def most_cached(self, row: int) -> int:
        """The most tokens of a row that may come from a cache: all it has, or, of a prompt, all but the last."""
        known, prompt = int(self._sequences.known[row]), int(self._sequences.prompt[row])
        return known if known > prompt else known - 1

    def junction(self, row: int) -> int:
        """Where a row's prompt parted from what the device had: the tokens that groups which keep all could serve."""
        return int(self._junction[row])

    def salt(self, row: int) -> str:
        """The salt of a row's request."""
        return self._salt[row]

    def blocks_freed_by(self, row: int) -> dict[str, int]:
        """Blocks per group that only this row holds: what preempting it would give back."""
        freed = {}
        for group in self.groups:
            ids = group.table.ids_of(row).ravel()
            freed[group.name] = int((self.pool.refs[ids] == 1).sum())
        return freed

    def pinned_blocks(self) -> Int64Array:
        """Ids of the blocks that pins hold; a block occurs once per pin."""
        return self._cache.pinned_blocks()

    def check(self) -> None:
        """All invariants, recomputed from scratch; `AssertionError` on the first that does not hold. For tests."""
        self.pool.check()
        self._cache.index.check(np.flatnonzero(self.pool.cached))
        holders = [self._steps.held(), self.pinned_blocks(), self._cache.held_blocks()]
        holders += [ids for load in self._loading.values() for ids in load.states.values()]
        holders += [ids for checkpoints in self._checkpoints.values() for ids in checkpoints.values()]
        for row in self.running_rows.tolist():
            for group in self.groups:
                loading = self._loading.get(row)
                length = int(self.committed[row]) if loading is None else loading.num_tokens
                group.check(row, length, self.pool.owner, self.pool.stride)
                holders.append(group.table.ids_of(row).ravel())
        expected = np.bincount(np.concatenate(holders), minlength=len(self.pool.refs))
        assert (expected == self.pool.refs).all(), "references and holders differ"

    def _check_running(self, row: int) -> None:
        if not 0 <= row < self.max_requests or not self._steps.running[row]:
            raise KvtideError(f"row {row} is not running")

    def _exhausted(self, needs: Sequence[int], shared: Int64Array | None = None) -> Exhausted:
        shortfall = {
            group.name: short
            for group, need in zip(self.groups, needs, strict=True)
            if (short := need - self.pool.spare_blocks(group.number)) > 0
        }
        pages = self.pool.pages_short(needs, shared)
        wanted = ", ".join(f"{count} blocks of {name}" for name, count in shortfall.items())
        return Exhausted(f"{wanted} need {pages} more pages than can be had", shortfall, pages, self._would_free)

    def _would_free(self) -> dict[int, dict[str, int]]:
        return {row: self.blocks_freed_by(row) for row in self.running_rows.tolist()}
