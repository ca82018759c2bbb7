"""What those need that move blocks between the device and lower tiers.

Loads bring tokens that are not computed; blocks are found, held while something reads them, and shown when evicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import KvtideError
from kvtide.kvcache.specs import Int64Array

from .cache import Evicted
from .loads import Load, LoadRun, Refused, cached_blocks, own_blocks, take_load
from .plans import Admission
from .pool_state import CLASS_SCRAP
from .sequences import FreshKeys
from .stepping import StepCalls
from .steps import whole_numbers
from .tables import NO_BLOCK


class TierCalls(StepCalls):
    """A row's load takes it straight to a longer length; until it has ended the row rests."""

    def keys(self, row: int, first: int, end: int) -> list[bytes]:
        """Chain keys of the row's base blocks `first` to `end - 1`; each covers the tokens up to its block's end."""
        return self._sequences.chain(row).between(first, end)

    @property
    def load_step(self) -> int:
        """Loads end at multiples of this many tokens: where a block of every group ends."""
        sizes = [group.fmt.block_size for group in self.groups if not (group.is_state or group.is_cross)]
        return math.lcm(self.base, *sizes)

    def reserve_load(self, row: int, num_tokens: int) -> list[LoadRun]:
        """Take the blocks that a row needs to go on from `num_tokens` tokens, which are loaded instead of computed.

        Returns the blocks to fill; what the device has is not among them. Until `settle_load` or `cancel_load` the row
        cannot be reserved for; preempting or releasing it cancels the load as well. Blocks that are out of reach at the
        new length are let go at once. `Exhausted` when the blocks do not fit: then nothing has changed.
        """
        self._check_running(row)
        if not self._cache.enabled:
            raise KvtideError("loads need prefix caching: keys say what is loaded")
        committed, most = int(self.committed[row]), self.most_cached(row)
        if row in self._loading or self._steps.in_flight[row]:
            raise KvtideError(f"row {row} is being loaded, or has tokens in flight; a load starts from a row at rest")
        if num_tokens % self.load_step or not committed < num_tokens <= most:
            raise KvtideError(
                f"a load of row {row} must end at a multiple of {self.load_step} tokens above {committed} and up to "
                f"{most}, not at {num_tokens}"
            )
        self._cache.catch_up()
        chain = self._sequences.chain(row)
        taken = take_load(
            self.groups, self.pool, self._cache.index, chain, row=row, committed=committed, num_tokens=num_tokens
        )
        if isinstance(taken, Refused):
            raise self._exhausted(taken.needs, taken.shared)
        load, dropped = taken
        if len(dropped):
            self._cache.release(dropped, np.full(len(dropped), CLASS_SCRAP), self._salt[row])
        self._loading[row] = load
        self._covered[row] = 0
        self._changed[:, row] = True
        return load.runs

    def settle_load(self, row: int, failed: Mapping[str, npt.ArrayLike] | None = None) -> Admission:
        """A row's load has ended: what arrived is cached under its keys, and the row goes on from the load's length.

        `failed` names per group the logical blocks that did not arrive. If there are any, the row starts again from
        the longest prefix that the device can serve now.
        """
        load = self._load_of(row)
        missing = self._missing(load, failed or {})
        del self._loading[row]
        self.committed[row] = load.num_tokens
        rows = np.array([row])
        self._cache.advance_loaded(row, load.num_tokens, missing)
        arrived = [group for group in self._states if not np.isin(load.states[group.number], missing).any()]
        if arrived:
            number = load.num_tokens // self.base - 1
            key = FreshKeys(rows, np.array([number]), self._sequences.chain(row).between(number, number + 1))
            self._cache.register_states(arrived, load.states, key)
        replaced = self._checkpoints.pop(row, {})
        if load.states:
            self._checkpoints[row] = load.states
        for ids in replaced.values():
            self._cache.release(ids, np.full(len(ids), self._class[row]), self._salt[row])
        if not len(missing):
            return Admission(row, load.num_tokens, ())
        self._leave(row)
        return self._start(row)

    def cancel_load(self, row: int) -> Admission:
        """A row's load is given up: its blocks go back, and the row starts again from what the device has."""
        self._load_of(row)
        self._leave(row)
        return self._start(row)

    def look_again(self, row: int) -> Admission:
        """Start a row at rest, that has computed nothing yet, again from what the device has by now."""
        self._check_running(row)
        if row in self._loading or self._steps.in_flight[row]:
            raise KvtideError(f"row {row} is being loaded, or has tokens in flight; only a row at rest can look again")
        self._leave(row)
        return self._start(row)

    def _load_of(self, row: int) -> Load:
        if row not in self._loading:
            raise KvtideError(f"row {row} is not being loaded")
        return self._loading[row]

    def _missing(self, load: Load, failed: Mapping[str, npt.ArrayLike]) -> Int64Array:
        """Ids of the blocks that a load did not bring."""
        ids = [np.empty(0, dtype=np.int64)]
        for name, logical in failed.items():
            group, number = self.group(name), whole_numbers("failed", logical)
            for run in load.runs:
                if run.group == name:
                    ids.append(group.table.to_ids(run.entries[:, np.isin(run.logical, number)]).ravel())
        return np.concatenate(ids)

    # -- blocks that something outside reads --------------------------------------------------------------------------

    def blocks_of(self, row: int, group: str, logical: Int64Array) -> npt.NDArray[np.int32]:
        """Entries `[tables, n]` of whole logical blocks of a row: those it holds, else those the cache has of them.

        -1 where there is neither. The tokens of the blocks must be known. Of a state: checkpoints, by the number of
        the base block at whose end they stand.
        """
        managed = self.group(group)
        if managed.is_cross:
            raise KvtideError(f"blocks of group {group} have no keys: text does not determine them")
        ids = own_blocks(managed, row, int(self.committed[row]), logical)
        if self._cache.enabled and len(rest := np.flatnonzero(ids[0] < 0)):
            self._cache.catch_up()
            ids[:, rest] = cached_blocks(managed, self._cache.index, self._sequences.chain(row), logical[rest])
        return np.where(ids >= 0, managed.table.to_entries(np.maximum(ids, 0)), np.int32(NO_BLOCK))

    def hold(self, row: int, group: str, entries: npt.NDArray[np.int32]) -> int:
        """Keep blocks that a row holds, or the cache has, from being reused while something reads them."""
        self._check_running(row)
        ids = self.group(group).table.to_ids(entries).ravel()
        return self._cache.hold(ids, np.full(len(ids), self._class[row]), self._salt[row])

    def unhold(self, hold: int) -> None:
        """End a hold."""
        self._cache.unhold(hold)

    def forget(self, group: str, entries: npt.NDArray[np.int32]) -> None:
        """Forget those of a group's blocks that are cached and that nothing holds: they are free at once."""
        self._cache.forget(self.group(group).table.to_ids(entries).ravel())

    def on_evict(self, callback: Callable[[list[Evicted]], None] | None) -> None:
        """Show blocks that the pool takes from the cache, and that could still complete a hit, before they are reused.

        Called inside `reserve`, `reserve_load` and `checkpoint`, which may not be called from it; the blocks' bytes are
        there until the engine runs what was reserved. What is dropped on purpose (quotas, `forget`, `reset_cache`) is
        not shown.
        """
        self._cache.on_evict = callback
