"""`HybridMemoryManager`: who owns which block now. An engine calls it once per step for the whole batch.

    admit ─► row, hit ──► reserve(rows, n) ─► engine computes n tokens a row ─► commit(rows, accepted) ─┐
                             ▲   tables, slots, copies                                                  │
                             └──────────────────────────────────────────────────────────────────────────┘
    preempt(row): gives its blocks back, resume(row) looks them up again;  release(row): the request has ended.

Reserve is all or nothing. Only committed tokens get a key and move windows, so a rejected draft is never cached and a
window never slides past what the next query reads. Steps are committed in the order in which they were reserved; blocks
of a row that leaves while a step is in flight stay held until that step is committed. Not thread-safe, by contract:
transfers and other threads hand in their results at a step boundary.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import ConfigError, Exhausted, KvtideError, ModelLayout
from kvtide.kvcache.geometry import PageGeometry
from kvtide.kvcache.sizes import parse_bytes
from kvtide.kvcache.solver import solve_geometry
from kvtide.kvcache.specs import Int64Array

from .accounting import MemoryByCause, account
from .cache import Evicted, Pin, PrefixCache
from .drafts import DraftAccounting
from .events import KvEvent
from .groups import ManagedGroup, base_block, make_groups
from .hashing import Item, KeyChain, as_token_bytes, as_tokens, namespace
from .loads import Load, LoadRun, Refused, cached_blocks, own_blocks, take_load
from .pool import CLASS_NORMAL, CLASS_SCRAP, PagePool
from .sequences import FreshKeys, Sequences
from .steps import MAX_DRAFTS, Parting, Step, StepQueue, whole_numbers
from .tables import NO_BLOCK, GroupTable, ranges

# Tokens behind the window that a prompt's end keeps at full value, so that a prompt which parts a little earlier still
# finds its window; never less than two base blocks.
JUNCTION_SLACK = 512
PRIORITIES = (-3, 3)
NO_LIMIT = np.iinfo(np.int64).max


class Admission(NamedTuple):
    """A request has a row. Its first `num_cached_tokens` tokens are there already.

    `limited_by` names the groups that could not serve a longer hit.
    """

    row: int
    num_cached_tokens: int
    limited_by: tuple[str, ...]


class Copy(NamedTuple):
    """Blocks to copy before the step runs, table by table: unit indices of a group's blocks."""

    group: str
    source: npt.NDArray[np.int32]
    destination: npt.NDArray[np.int32]


class Reservation(NamedTuple):
    """One step. Row `rows[i]` computes tokens `[start[i], start[i] + num_tokens[i])`.

    `changed` names, per group, the rows of its table that differ from the last step's.
    """

    step: int
    rows: Int64Array
    start: Int64Array
    num_tokens: Int64Array
    changed: dict[str, Int64Array]
    copies: list[Copy]


class HybridMemoryManager:
    """The memory manager of one rank.

    `memory` is in bytes (or text such as "64GiB"); `max_model_len` defaults to the layout's; `max_step_tokens` is the
    most tokens of one row in one step. `lookahead` slots are reserved beyond every step's tokens, for drafts.
    `drop_last_block` serves drafters that must recompute the last block of a hit. `model_id` and `hash_key` separate
    caches; `key_space` says instead what the keys stand for, so that ranks with different shares of one model agree on
    them. `events` keeps `take_events` filled. `pin_memory` page-locks the tables (needs torch). `ConfigError` for
    arguments out of range.
    """

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

    # -- a request comes, waits, goes ---------------------------------------------------------------------------------

    def admit(
        self,
        request_id: str,
        token_ids: npt.ArrayLike,
        *,
        salt: str = "",
        adapter: str = "",
        items: Sequence[Item] = (),
        image_tokens: int = 0,
        priority: int = 0,
    ) -> Admission:
        """Give a request a row and pin the blocks of the longest prefix that is cached.

        `token_ids` is the prompt, of any integer dtype. Prompts of different `salt` or `adapter` never share blocks;
        `items` are the prompt's multimodal items. `image_tokens` are kept by cross-attention layers; without `items`
        that say which images they are, such a prompt shares nothing. `priority` from -3 to 3 says how long its blocks
        stay cached afterwards. The last token is never served from the cache. Takes no memory beyond the hit.
        `Exhausted` when all rows are taken, `ConfigError` for a bad prompt.
        """
        tokens = as_token_bytes(token_ids)
        count = len(tokens) // 4
        if request_id in self._row_of:
            raise ConfigError(f"request {request_id!r} has been admitted already, in row {self._row_of[request_id]}")
        if not 1 <= count <= self.max_model_len:
            raise ConfigError(f"request {request_id!r} has {count} tokens; allowed are 1 to {self.max_model_len}")
        if not PRIORITIES[0] <= priority <= PRIORITIES[1]:
            raise ConfigError(f"priority {priority} of request {request_id!r} must be from -3 to 3")
        if not 0 <= image_tokens <= self.max_model_len:
            raise ConfigError(
                f"image_tokens {image_tokens} of request {request_id!r} must be from 0 to {self.max_model_len}"
            )
        for item in items:
            if not 0 <= item.position < count:
                raise ConfigError(f"an item of request {request_id!r} starts at {item.position}, of {count} tokens")
        if not self._free_rows:
            raise Exhausted(f"all {self.max_requests} rows are taken")
        parts = [salt, adapter]
        if image_tokens and not items and any(group.is_cross for group in self.groups):
            # The text's keys and values depend on the images. Without a digest of them nothing may be shared.
            # Random, since keys may outlive the process in a store that others share.
            parts.append(f"unknown images {secrets.token_hex(16)}")
        space = namespace(self._space, *parts)
        row = self._free_rows.pop()
        self._sequences.start(row, space, tokens, sorted(items), hashed=self._cache.enabled)
        self._row_of[request_id] = row
        self._request_of[row] = request_id
        self._salt[row] = salt
        self.image_tokens[row] = image_tokens
        self._class[row] = CLASS_NORMAL + priority
        return self._start(row)

    def resume(self, row: int) -> Admission:
        """Bring a preempted request back: look up what is still cached of all tokens it had."""
        if not 0 <= row < self.max_requests or self._request_of[row] is None or self._steps.running[row]:
            raise KvtideError(f"row {row} is not preempted; only a preempted request can be resumed")
        return self._start(row)

    def preempt(self, row: int) -> None:
        """Give back all blocks of a running request; it keeps its row, and what stays cached is found again."""
        self._check_running(row)
        self._leave(row)

    def release(self, row: int) -> None:
        """The request has ended: give back its blocks and its row. What has a key stays cached."""
        request = self._request_of[row] if 0 <= row < self.max_requests else None
        if request is None:
            raise KvtideError(f"row {row} holds no request; it was released already or never admitted")
        if self._steps.running[row]:
            self._leave(row)
        del self._row_of[request]
        self._request_of[row] = None
        self._sequences.end(row)
        self._free_rows.append(row)

    def abort(self, request_id: str) -> None:
        """The client has gone: release its request by name, whatever it is doing, also while a step is in flight."""
        self.release(self.row_of(request_id))

    def _start(self, row: int) -> Admission:
        # The token after the known ones has been sampled once decoding has begun; before that the last one is computed.
        hit = self._cache.find(self._sequences.chain(row), self.most_cached(row))
        for group in self.groups:
            part = hit.blocks.get(group.number)
            if part is None:
                continue
            if group.is_state:
                self._checkpoints.setdefault(row, {})[group.number] = part.ids[:, 0]
            else:
                group.table.place(row, part.first, part.end, part.ids)
        self._steps.start(row)
        self.committed[row] = hit.num_tokens
        self._cache.begin(row, hit)
        self._junction[row] = hit.junction
        self._mark_useful(row)
        self._covered[row] = 0
        self._changed[:, row] = True
        return Admission(row, hit.num_tokens, hit.limited_by)

    def _mark_useful(self, row: int) -> None:
        """Where a row's dead window blocks are worth keeping: where a hit may end.

        That is a little before the end of the prompt, and where this prompt parted from an earlier one. What is
        generated is hit at its end, and that is still in the window when the row leaves.
        """
        prompt, junction = int(self._sequences.prompt[row]), int(self._junction[row])
        slack = max(JUNCTION_SLACK, 2 * self.base)
        for number, bounds in self._useful.items():
            fmt = self.groups[number].fmt
            reach = fmt.group.spec.reach or 0
            bounds[:, 0, row] = prompt - reach - slack, prompt + fmt.block_size - 1
            bounds[:, 1, row] = junction - reach, junction

    def _leave(self, row: int) -> None:
        """Give back what a row holds, its tail before its head, in one order over all groups."""
        positions: list[Int64Array] = []
        blocks: list[Int64Array] = []
        counts: dict[int, int] = {}
        self._cache.catch_up_before(np.array([row]), self.committed[row : row + 1])
        for group in self.groups:
            logical, ids = group.table.clear(row)
            if len(logical):
                ends = (logical + 1) * (group.fmt.block_size or self.max_model_len)
                positions.append(np.repeat(ends, group.fmt.tables))
                blocks.append(ids.T.ravel())
                counts[group.number] = ids.size
        loading = self._loading.pop(row, None)
        for states in (self._checkpoints.pop(row, {}), {} if loading is None else loading.states):
            for number, ids in states.items():
                positions.append(np.zeros(len(ids), dtype=np.int64))
                blocks.append(ids)
                counts[number] = counts.get(number, 0) + len(ids)
        held = np.concatenate(blocks) if blocks else np.empty(0, dtype=np.int64)
        if len(blocks) > 1:
            held = held[np.argsort(-np.concatenate(positions), kind="stable")]
        self.committed[row] = self._sequences.registered[row] = 0
        self._changed[:, row] = True
        parting = Parting(held, np.full(len(held), self._class[row]), self._salt[row], counts)
        if self._steps.stop(row, parting):
            self._cache.release(*parting)

    # -- a step -------------------------------------------------------------------------------------------------------

    def reserve(
        self,
        rows: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        *,
        num_drafts: npt.ArrayLike | None = None,
        kv_from_activations: bool = False,
    ) -> Reservation:
        """Take the blocks for the next `num_tokens[i]` tokens of every row, and `lookahead` slots beyond them.

        `num_drafts[i]` of the tokens are drafts, for the metrics. With `kv_from_activations` the engine's kernel reads
        the step's own keys and values from its activations, so that tokens which are out of reach once the step is done
        get no block (slot -1), and prompts that part inside them later find no window there. `Exhausted` when the
        blocks do not fit: then nothing has changed.
        """
        # Copies, since they are kept until the commit and engines reuse their arrays.
        rows = whole_numbers("rows", rows)
        tokens = whole_numbers("num_tokens", num_tokens)
        drafts = None if num_drafts is None else whole_numbers("num_drafts", num_drafts)
        self._steps.check_reserve(rows, tokens, drafts, self.max_step_tokens)
        if self._loading and (waiting := self._loading.keys() & set(rows.tolist())):
            raise KvtideError(f"row {min(waiting)} is being loaded; settle or cancel its load first")
        start = self.committed[rows]
        if not self._steps.is_idle:
            start += self._steps.in_flight[rows]
        upper = start + tokens
        self._check_length(rows, upper)
        sure = None
        if kv_from_activations:
            # Drafts, of this step and of those in flight, may all be rejected: what is dead must be dead without them.
            sure = upper - self._steps.drafts_in_flight[rows] - (0 if drafts is None else drafts)
        if self.lookahead:
            upper += self.lookahead
        has_gap = None
        short = (upper > self._covered[rows]).nonzero()[0]
        if len(short):
            gap = self._grow(rows[short], upper[short], None if sure is None else sure[short])
            if gap is not None:
                has_gap = np.zeros(len(rows), dtype=np.bool_)
                has_gap[short] = gap
        number = self._steps.push(rows, tokens, drafts, has_gap)
        changed = {}
        for group in self.groups:
            dirty = self._changed[group.number]
            changed[group.name] = dirty.nonzero()[0]
            dirty.fill(False)
        # A row that had nothing in flight before starts from its checkpoint; a second step goes on from the first.
        restored = self._restored(rows[start == self.committed[rows]]) if self._checkpoints else []
        return Reservation(number, rows, start, tokens, changed, restored)

    def slots(self, plan: Reservation, group: str) -> Int64Array:
        """Where the step's tokens are written, `[tables, plan.num_tokens.sum()]`: `entry * block_size + offset`, or -1.

        Valid until the next call that changes the tables. Not for recurrent states and cross attention.
        """
        managed = self.group(group)
        if managed.is_state or managed.is_cross:
            raise KvtideError(f"group {group} has no slots per token of the text sequence")
        owners = np.repeat(plan.rows, plan.num_tokens)
        return managed.slots(owners, np.repeat(plan.start, plan.num_tokens) + ranges(plan.num_tokens))

    def commit(self, rows: npt.ArrayLike, num_accepted: npt.ArrayLike, token_ids: npt.ArrayLike | None = None) -> None:
        """The oldest step in flight is done: `num_accepted[i]` of its tokens stand in row `rows[i]`, the rest do not.

        `rows` are the step's rows that are still running, in its order. `token_ids` holds, row by row, the accepted
        tokens that the manager has not seen (those beyond the prompt); it may be left out while there are none. Full
        blocks get their keys, windows slide, dead blocks go back. `KvtideError` for anything that does not match the
        step: then nothing has changed.
        """
        rows = whole_numbers("rows", rows)
        accepted = whole_numbers("num_accepted", num_accepted)
        step = self._steps.oldest(rows, accepted)
        if self._states:
            self._check_states(step, accepted)
        committed = self.committed[rows] + accepted
        if self._cache.enabled:
            ids = as_tokens([] if token_ids is None else token_ids)
            unseen = self._sequences.unseen(rows, committed)
            if len(ids) != unseen.sum():
                raise KvtideError(
                    f"token_ids has {len(ids)} tokens; {int(unseen.sum())} of the rows' were not seen before"
                )
            if len(ids):
                self._sequences.learn(rows, unseen, ids)
        partings = self._steps.retire(step)
        self.committed[rows] = committed
        if step.num_drafts is not None and step.num_drafts.any():
            self.drafts.record(step.num_drafts, np.maximum(accepted - (step.num_tokens - step.num_drafts), 0))
        if self._states:
            self._settle_states(rows, accepted)
        if self._cache.enabled:
            self._cache.advance(rows, committed)
        for group in self.groups:
            if group.is_bounded:
                self._slide(group, rows, committed)
        for parting in partings:
            self._cache.release(*parting)

    def checkpoint(self, row: int) -> list[Copy]:
        """Keep a copy of a row's recurrent states for later prefix hits.

        Call it when `committed[row]` is a whole number of base blocks and nothing is in flight, and make the copies
        before the next step. Empty when there is no room, or no state.
        """
        self._check_running(row)
        committed, in_flight = int(self.committed[row]), int(self._steps.in_flight[row])
        if not self._states or not self._cache.enabled:
            return []
        if committed % self.base or not committed or in_flight:
            raise KvtideError(
                f"row {row} has {committed} committed tokens and {in_flight} in flight; "
                f"a checkpoint needs a multiple of {self.base} and none in flight"
            )
        number = committed // self.base - 1
        key = self._sequences.chain(row).between(number, number + 1)[0]
        needs = [group.fmt.tables if group.is_state else 0 for group in self.groups]
        # The block that holds the running state exists from the first step on; before it there is nothing to keep.
        begun = all(group.table.end[row] for group in self._states)
        if not begun or self._cache.has_states(key, self._states) or self.pool.pages_short(needs) > 0:
            return []
        # Taking may evict, also what this key had; so everything is taken before it is put there, and held until then.
        taken = self.pool.take(needs)
        fresh = FreshKeys(np.array([row]), np.array([number]), [key])
        copies = [
            Copy(group.name, group.table.entries[:, row, 0].copy(), group.table.to_entries(taken[group.number]))
            for group in self._cache.register_states(self._states, taken, fresh)
        ]
        for group in self._states:
            ids = taken[group.number]
            self._cache.release(ids, np.full(len(ids), self._class[row]), self._salt[row])
        return copies

    # -- tokens that are loaded, not computed -------------------------------------------------------------------------

    def keys(self, row: int, first: int, end: int) -> list[bytes]:
        """Chain keys of the row's base blocks `first` to `end - 1`; each covers the tokens up to its block's end."""
        return self._sequences.chain(row).between(first, end)

    @property
    def load_step(self) -> int:
        """Loads end at multiples of this many tokens: where a block of every group ends."""
        sizes = [group.fmt.block_size for group in self.groups if not (group.is_state or group.is_cross)]
        return math.lcm(self.base, *sizes)

    def most_cached(self, row: int) -> int:
        """The most tokens of a row that may come from a cache: all it has, or, of a prompt, all but the last."""
        known, prompt = int(self._sequences.known[row]), int(self._sequences.prompt[row])
        return known if known > prompt else known - 1

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

    # -- inside a step ------------------------------------------------------------------------------------------------

    def _check_length(self, rows: Int64Array, after: Int64Array) -> None:
        if after.max(initial=0) > self.max_model_len:
            at = int(after.argmax())
            raise KvtideError(
                f"row {int(rows[at])} would have {int(after[at])} tokens; max_model_len is {self.max_model_len}"
            )
        if self._states and self.lookahead and self._steps.in_flight[rows].any():
            raise KvtideError("recurrent states with drafts need each step committed before the next is reserved")

    def _check_states(self, step: Step, accepted: Int64Array) -> None:
        """A step keeps the state after each of its tokens if `lookahead` has room for them, else after the last one."""
        lost = (accepted == 0) | ((accepted < step.num_tokens) & (step.num_tokens > 1 + self.lookahead))
        if lost.any():
            at = int(lost.argmax())
            raise KvtideError(
                f"row {int(step.rows[at])} commits {int(accepted[at])} of {int(step.num_tokens[at])} tokens, but its "
                "recurrent state after them was not kept; preempt it to begin again from a checkpoint"
            )

    def _grow(self, rows: Int64Array, upper: Int64Array, sure: Int64Array | None) -> npt.NDArray[np.bool_] | None:
        """Take what every group lacks for the rows to hold `upper[i]` tokens; says which rows got a gap, if any did.

        With `sure`, the least tokens that will be committed by then, what is out of reach at that length is not taken.
        """
        growths = [
            group.growth(rows, self.image_tokens[rows] if group.is_cross else upper, sure, self.lookahead)
            for group in self.groups
        ]
        needs = [growth.total * group.fmt.tables for group, growth in zip(self.groups, growths, strict=True)]
        if self.pool.pages_short(needs) > 0:
            raise self._exhausted(needs)
        has_gap: npt.NDArray[np.bool_] | None = None
        covered = np.full(len(rows), NO_LIMIT)
        for group, growth, ids in zip(self.groups, growths, self.pool.take(needs), strict=True):
            if growth.total or growth.gaps is not None:
                self._changed[group.number, group.append(rows, growth, ids)] = True
            if growth.gaps is not None:
                has_gap = growth.gaps > 0 if has_gap is None else has_gap | (growth.gaps > 0)
            if not (group.is_state or group.is_cross):
                np.minimum(covered, group.table.end[rows] * group.fmt.block_size, out=covered)
        self._covered[rows] = covered
        return has_gap

    def _slide(self, group: ManagedGroup, rows: Int64Array, committed: Int64Array) -> None:
        first = group.first_block(committed)
        moved = (first > group.table.first[rows]).nonzero()[0]
        if not len(moved):
            return
        rows, first = rows[moved], first[moved]
        self._cache.catch_up_before(rows, first * group.fmt.block_size)
        owners, logical, ids = group.table.slide(rows, first)
        self._changed[group.number, rows] = True
        end = (logical + 1) * group.fmt.block_size
        above, upto = self._useful[group.number][:, :, owners]
        useful = ((end > above) & (end <= upto)).any(axis=0)
        classes = np.where(useful, self._class[owners], np.uint8(CLASS_SCRAP))
        tables = group.fmt.tables
        salts = [self._salt[row] for row in np.repeat(owners, tables).tolist()] if self._cache.quotas else []
        if tables > 1:
            classes = np.repeat(classes, tables)
        self._cache.release_dead(group, ids.T.ravel(), classes, salts)

    def _restored(self, rows: Int64Array) -> list[Copy]:
        """Copies that bring a hit's checkpoints into the running states."""
        copies: list[Copy] = []
        for row in rows.tolist():
            for number, ids in self._checkpoints.get(row, {}).items():
                table = self.groups[number].table
                copies.append(Copy(self.groups[number].name, table.to_entries(ids), table.entries[:, row, 0].copy()))
        return copies

    def _settle_states(self, rows: Int64Array, accepted: Int64Array) -> None:
        """Let go of restored checkpoints, and make the state after the last accepted token the running one."""
        for row in rows.tolist() if self._checkpoints else ():
            for ids in self._checkpoints.pop(row, {}).values():
                self._cache.release(ids, np.full(len(ids), self._class[row]), self._salt[row])
        if not self.lookahead:
            return
        for group in self._states:
            chosen = (accepted > 1) & (accepted <= 1 + self.lookahead)
            group.table.swap_to_front(rows[chosen], accepted[chosen] - 1)
            self._changed[group.number, rows[chosen]] = True

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

    # -- the cache ----------------------------------------------------------------------------------------------------

    def pin(self, token_ids: npt.ArrayLike, *, salt: str = "", adapter: str = "", items: Sequence[Item] = ()) -> Pin:
        """Hold the longest cached prefix of some tokens, so that it cannot be evicted until `unpin`."""
        tokens = as_token_bytes(token_ids)
        chain = KeyChain(self.base, namespace(self._space, salt, adapter), tokens, sorted(items))
        return self._cache.pin(chain, len(tokens) // 4, salt)

    def unpin(self, pin: Pin) -> None:
        """Let go of a pinned prefix; it stays cached like any other."""
        self._cache.unpin(pin)

    def set_quota(self, salt: str, num_bytes: int | str | None) -> None:
        """Bound the cached bytes that requests of a salt leave behind from now on; 0 keeps none, None lifts it."""
        self._cache.quotas.set(salt, num_bytes if num_bytes is None or num_bytes == 0 else parse_bytes(num_bytes))

    def catch_up(self) -> None:
        """Put all whole blocks under their keys now. Whoever looks for them does it; this is for idle moments."""
        self._cache.catch_up()

    def reset_cache(self) -> None:
        """Forget every cached block that nothing holds."""
        self._cache.reset()

    def take_events(self) -> list[KvEvent]:
        """The KV events since the last call; needs `events=True`."""
        return self._cache.take_events()

    # -- looking ------------------------------------------------------------------------------------------------------

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
