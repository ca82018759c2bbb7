"""`HybridMemoryManager`: who owns which block now. An engine calls it once per step for the whole batch.

    admit ─► row, hit ──► reserve(rows, n) ─► engine computes n tokens a row ─► commit(rows, accepted) ─┐
                             ▲   tables, slots, copies                                                  │
                             └───────────────────────────────────────────────────────────────────────────┘
    preempt(row): gives its blocks back, resume(row) looks them up again;  release(row): the request has ended.

Reserve is all or nothing. Only committed tokens get a key and move windows, so a rejected draft is never cached and a
window never slides past what the next query reads. Steps are committed in the order in which they were reserved; blocks
of a row that leaves while a step is in flight stay held until that step is committed. Not thread-safe, by contract:
transfers and other threads hand in their results at a step boundary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import ConfigError, Exhausted, KvtideError, ModelLayout
from kvtide.kvcache.geometry import PageGeometry
from kvtide.kvcache.sizes import parse_bytes
from kvtide.kvcache.solver import solve_geometry
from kvtide.kvcache.specs import Int64Array, SinkWindow

from .drafts import DraftAccounting
from .groups import Growth, ManagedGroup
from .hashing import Item, KeyChain, as_token_bytes, namespace
from .hits import Hit, find_hit
from .pool import CLASS_NORMAL, CLASS_SCRAP, PagePool
from .prefix_index import PrefixIndex
from .tables import GroupTable, ranges

# Blocks behind the window that a prompt's end keeps at full value, so that a prompt which parts a little earlier still
# finds its window: enough for two base blocks, or 64 tokens.
JUNCTION_SLACK = 64
# Most drafts of one row in one step; engines allow at most 128.
MAX_DRAFTS = 128


class Admission(NamedTuple):
    """A request has a row. Its first `num_cached_tokens` tokens are there already; `limited_by` names the groups that
    could
    not serve a longer hit."""

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


class _Step(NamedTuple):
    number: int
    rows: Int64Array
    generation: Int64Array
    num_tokens: Int64Array
    num_drafts: Int64Array
    has_gap: npt.NDArray[np.bool_]


class HybridMemoryManager:
    """The memory manager of one rank.

    `memory` is in bytes (or text such as "64GiB"); `max_model_len` defaults to the layout's; `max_step_tokens` is the
    most tokens of one row in one step. `lookahead` slots are reserved beyond every step's tokens, for drafts.
    `drop_last_block` serves drafters that must recompute the last block of a hit. `model_id` and `hash_key` separate
    caches. `pin_memory` page-locks the tables (needs torch). `ConfigError` for arguments out of range.
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
        if any(fmt.keeps_all or fmt.padding_layers for fmt in geometry.formats) or geometry.one_table:
            raise ConfigError(f"the {geometry.policy} geometry is a baseline without tables of its own per group")
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
        self.drafts = DraftAccounting(MAX_DRAFTS)
        self._caching = prefix_caching
        self._drop_last = drop_last_block
        self._space = namespace(
            model_id, repr([(f.group.name, f.group.spec, f.block_size) for f in geometry.formats]), hash_key
        )
        self.pool = PagePool(geometry, num_pages, self._forget_blocks)
        self.base = _base_block(geometry)
        self.groups = tuple(self._make_group(number, pin_memory) for number in range(len(geometry.formats)))
        self._draft_groups = [group.number for group in self.groups if group.draft_only]
        self.index = PrefixIndex([group.cells_per_key for group in self.groups], num_pages * self.pool.stride)

        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_requests - 1, -1, -1))
        self._request_of: list[str | None] = [None] * max_requests
        self._chain: list[KeyChain | None] = [None] * max_requests
        self._sources: dict[int, dict[int, Int64Array]] = {}
        self._holding: list[Int64Array] = []
        self._running = np.zeros(max_requests, dtype=np.bool_)
        self._generation = np.zeros(max_requests, dtype=np.int64)
        self.committed = np.zeros(max_requests, dtype=np.int64)
        self._known = np.zeros(max_requests, dtype=np.int64)
        self._prompt = np.zeros(max_requests, dtype=np.int64)
        self._image = np.zeros(max_requests, dtype=np.int64)
        self._registered = np.zeros(max_requests, dtype=np.int64)
        self._class = np.zeros(max_requests, dtype=np.uint8)
        self._tail = np.zeros((max_requests, self.base), dtype="<i4")
        self._in_flight = np.zeros(max_requests, dtype=np.int64)
        self._changed = np.zeros((len(self.groups), max_requests), dtype=np.bool_)
        self._steps: deque[_Step] = deque()
        self._next_step = 0
        self._limbo: deque[tuple[int, Int64Array, npt.NDArray[np.uint8]]] = deque()

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
        `items` are the prompt's multimodal items by position. `image_tokens` are kept by cross-attention layers.
        `priority` from -3 to 3 says how long its blocks stay cached afterwards. The last token is never served from the
        cache. Takes no memory beyond the hit. `Exhausted` when all rows are taken, `ConfigError` for a bad prompt.
        """
        tokens = as_token_bytes(token_ids)
        count = len(tokens) // 4
        if request_id in self._row_of:
            raise ConfigError(f"request {request_id!r} has been admitted already, in row {self._row_of[request_id]}")
        if not 1 <= count <= self.max_model_len:
            raise ConfigError(f"request {request_id!r} has {count} tokens; allowed are 1 to {self.max_model_len}")
        if not -3 <= priority <= 3:
            raise ConfigError(f"priority {priority} of request {request_id!r} must be from -3 to 3")
        if not 0 <= image_tokens <= self.max_model_len:
            raise ConfigError(
                f"image_tokens {image_tokens} of request {request_id!r} must be from 0 to {self.max_model_len}"
            )
        if not self._free_rows:
            raise Exhausted(f"all {self.max_requests} rows are taken")
        chain = KeyChain(self.base, namespace(self._space, salt, adapter))
        if self._caching:
            chain.extend(tokens, sorted(items))
        row = self._free_rows.pop()
        self._row_of[request_id] = row
        self._request_of[row] = request_id
        self._chain[row] = chain
        rest = count % self.base
        self._tail[row, :rest] = np.frombuffer(tokens[len(tokens) - 4 * rest :], dtype="<i4")
        self._known[row] = self._prompt[row] = count
        self._image[row] = image_tokens
        self._class[row] = CLASS_NORMAL + priority
        return self._start(row)

    def resume(self, row: int) -> Admission:
        """Bring a preempted request back: look up what is still cached of all tokens it had."""
        if self._request_of[row] is None or self._running[row]:
            raise KvtideError(f"row {row} is not preempted; only a preempted request can be resumed")
        return self._start(row)

    def preempt(self, row: int) -> None:
        """Give back all blocks of a running request; it keeps its row, and what stays cached is found again."""
        self._check_running(row)
        self._leave(row)

    def release(self, row: int) -> None:
        """The request has ended, or is aborted: give back its blocks and its row. What has a key stays cached."""
        if not 0 <= row < self.max_requests or self._request_of[row] is None:
            raise KvtideError(f"row {row} holds no request; it was released already or never admitted")
        if self._running[row]:
            self._leave(row)
        request = self._request_of[row]
        assert request is not None
        del self._row_of[request]
        self._request_of[row] = None
        self._chain[row] = None
        self._free_rows.append(row)

    def _start(self, row: int) -> Admission:
        known = int(self._known[row])
        # The token after the known ones has been sampled once decoding has begun; before that the last one is computed.
        limit = known if known > self._prompt[row] else known - 1
        chain = self._chain[row]
        assert chain is not None
        hit = find_hit(self.groups, self.index, chain.keys, limit, self._drop_last) if self._caching else Hit(0, {}, ())
        self._take_over(row, hit)
        self._running[row] = True
        self._generation[row] += 1
        self.committed[row] = hit.num_tokens
        self._registered[row] = hit.num_tokens // self.base
        self._in_flight[row] = 0
        self._changed[:, row] = True
        return Admission(row, hit.num_tokens, hit.limited_by)

    def _take_over(self, row: int, hit: Hit) -> None:
        if not hit.num_tokens:
            return
        # All groups pin before anything else can be taken, so that no group's growth evicts another's hit.
        self.pool.acquire(np.concatenate([part.ids.ravel() for part in hit.blocks.values()]))
        for group in self.groups:
            if group.number not in hit.blocks:
                continue
            part = hit.blocks[group.number]
            if group.is_state:
                self._sources.setdefault(row, {})[group.number] = part.ids[:, 0]
            else:
                group.table.place(row, part.first, part.end, part.ids)

    def _leave(self, row: int) -> None:
        """Give back what a row holds, its tail before its head, in one order over all groups."""
        positions, blocks = [], []
        for group in self.groups:
            logical, ids = group.table.clear(row)
            ends = (logical + 1) * (group.fmt.block_size or self.max_model_len)
            positions.append(np.repeat(ends, group.fmt.tables))
            blocks.append(ids.T.ravel())
        for ids in self._sources.pop(row, {}).values():
            positions.append(np.zeros(len(ids), dtype=np.int64))
            blocks.append(ids)
        held = np.concatenate(blocks)
        held = held[np.argsort(-np.concatenate(positions), kind="stable")]
        classes = self._classes(held, np.full(len(held), self._class[row]))
        self._running[row] = False
        self.committed[row] = self._registered[row] = 0
        self._changed[:, row] = True
        if self._in_flight[row]:
            last = max(step.number for step in self._steps if (step.rows == row).any())
            self._limbo.append((last, held, classes))
        else:
            self.pool.release(held, classes)
        self._in_flight[row] = 0

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
        get no block (slot -1). `Exhausted` when the blocks do not fit: then nothing has changed.
        """
        rows = np.asarray(rows, dtype=np.int64)
        tokens = np.asarray(num_tokens, dtype=np.int64)
        drafts = np.zeros_like(tokens) if num_drafts is None else np.asarray(num_drafts, dtype=np.int64)
        start = self._check_reserve(rows, tokens, drafts)
        after = start + tokens
        upper = after + self.lookahead
        growths: list[Growth] = []
        for group in self.groups:
            stored = self._image[rows] if group.is_cross else upper
            growths.append(group.growth(rows, stored, after if kv_from_activations else None, self.lookahead))
        needs = [growth.total * group.fmt.tables for group, growth in zip(self.groups, growths, strict=True)]
        if self.pool.pages_short(needs) > 0:
            raise self._exhausted(needs)

        has_gap = np.zeros(len(rows), dtype=np.bool_)
        for group, growth, need in zip(self.groups, growths, needs, strict=True):
            if need:
                group.append(rows, growth, self.pool.take(group.number, need))
                self._changed[group.number, rows[growth.counts + growth.sinks > 0]] = True
            elif growth.gaps.any():
                group.append(rows, growth, np.empty(0, dtype=np.int64))
            has_gap |= growth.gaps > 0
        copies = self._state_copies(rows)
        step = _Step(self._next_step, rows, self._generation[rows], tokens, drafts, has_gap)
        self._next_step += 1
        self._steps.append(step)
        self._in_flight[rows] += tokens
        changed = {}
        for group in self.groups:
            dirty = self._changed[group.number]
            changed[group.name] = np.flatnonzero(dirty)
            dirty[:] = False
        return Reservation(step.number, rows, start, tokens, changed, copies)

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
        """The oldest step in flight is done: `num_accepted[i]` of its tokens stand in row `rows[i]`, the rest were
        rejected.

        `rows` are the step's rows that are still running, in its order. `token_ids` holds, row by row, the accepted
        tokens that the manager has not seen (those beyond the prompt); it may be left out while there are none. Full
        blocks get their keys, windows slide, dead blocks go back. `KvtideError` for anything that does not match the
        step: then nothing has changed.
        """
        rows = np.asarray(rows, dtype=np.int64)
        accepted = np.asarray(num_accepted, dtype=np.int64)
        step, tokens, drafted, ids = self._check_commit(rows, accepted, token_ids)
        committed = self.committed[rows]
        if self._caching:
            self._learn(rows, committed, accepted, ids)
        self._steps.popleft()
        self._in_flight[rows] -= tokens
        self.committed[rows] = committed = committed + accepted
        self.drafts.record(*drafted)
        self._settle_states(rows, accepted)
        if self._caching:
            self._register(rows, committed)
        for group in self.groups:
            if group.is_bounded:
                self._slide(group, rows, committed)
        while self._limbo and self._limbo[0][0] <= step.number:
            _, held, classes = self._limbo.popleft()
            self.pool.release(held, classes)

    def checkpoint(self, row: int) -> list[Copy]:
        """Keep a copy of a row's recurrent states for later prefix hits.

        Call it when `committed[row]` is a whole number of base blocks and nothing is in flight, and make the copies
        before the next step. Empty when there is no room, or no state.
        """
        self._check_running(row)
        committed = int(self.committed[row])
        states = [group for group in self.groups if group.is_state]
        if not states or not self._caching:
            return []
        if committed % self.base or not committed or self._in_flight[row]:
            raise KvtideError(
                f"row {row} has {committed} committed tokens and {self._in_flight[row]} in flight; "
                f"a checkpoint needs a multiple of {self.base} and none in flight"
            )
        needs = [group.fmt.tables if group.is_state else 0 for group in self.groups]
        if self.pool.pages_short(needs) > 0:
            return []
        chain = self._chain[row]
        assert chain is not None
        nodes = self.index.nodes_for([chain.keys[committed // self.base - 1]])
        copies = []
        for group in states:
            ids = self.pool.take(group.number, group.fmt.tables)
            put = self.index.insert(group.number, nodes.repeat(len(ids)), np.arange(len(ids)), ids)
            self.pool.set_cached(put)
            if len(put):
                copies.append(Copy(group.name, group.table.entries[:, row, 0].copy(), group.table.to_entries(ids)))
            self.pool.release(ids, int(self._class[row]))
        self.index.forget_empty(nodes)
        return copies

    # -- inside a step ------------------------------------------------------------------------------------------------

    def _check_reserve(self, rows: Int64Array, tokens: Int64Array, drafts: Int64Array) -> Int64Array:
        if rows.ndim != 1 or tokens.shape != rows.shape or drafts.shape != rows.shape:
            raise KvtideError(
                "rows, num_tokens and num_drafts must be equally long, not "
                f"{rows.shape}, {tokens.shape}, {drafts.shape}"
            )
        if len(rows):
            if rows.min() < 0 or rows.max() >= self.max_requests or not self._running[rows].all():
                wrong = [row for row in rows.tolist() if not (0 <= row < self.max_requests and self._running[row])]
                raise KvtideError(f"row {wrong[0]} is not running; admit or resume it first")
            if np.bincount(rows).max() > 1:
                raise KvtideError("a row occurs twice in one step")
            if tokens.min() < 1 or tokens.max() > self.max_step_tokens:
                raise KvtideError(
                    f"num_tokens must be from 1 to max_step_tokens {self.max_step_tokens}, "
                    f"not {tokens.min()} to {tokens.max()}"
                )
            if drafts.min() < 0 or (drafts >= tokens).any() or drafts.max() > MAX_DRAFTS:
                raise KvtideError(f"num_drafts must be from 0 to num_tokens - 1, and at most {MAX_DRAFTS}")
        if len(self._steps) >= self.max_steps_in_flight:
            raise KvtideError(f"{len(self._steps)} steps are in flight; commit one first (max_steps_in_flight)")
        start: Int64Array = self.committed[rows] + self._in_flight[rows]
        beyond = np.flatnonzero(start + tokens > self.max_model_len)
        if len(beyond):
            row = int(rows[beyond[0]])
            raise KvtideError(
                f"row {row} would have {int((start + tokens)[beyond[0]])} tokens; max_model_len is {self.max_model_len}"
            )
        if self.lookahead and self._in_flight[rows].any() and any(group.is_state for group in self.groups):
            raise KvtideError("recurrent states with drafts need each step committed before the next is reserved")
        return start

    def _check_commit(
        self, rows: Int64Array, accepted: Int64Array, token_ids: npt.ArrayLike | None
    ) -> tuple[_Step, Int64Array, tuple[Int64Array, Int64Array], npt.NDArray[np.int32]]:
        if not self._steps:
            raise KvtideError("no step is in flight; reserve one first")
        step = self._steps[0]
        alive = step.generation == self._generation[step.rows]
        alive &= self._running[step.rows]
        everything = bool(alive.all())
        expected = step.rows if everything else step.rows[alive]
        if not np.array_equal(rows, expected):
            raise KvtideError(
                f"commit got rows {rows[:8].tolist()}; step {step.number} runs rows {expected[:8].tolist()}"
            )
        tokens = step.num_tokens if everything else step.num_tokens[alive]
        drafts = step.num_drafts if everything else step.num_drafts[alive]
        gaps = step.has_gap if everything else step.has_gap[alive]
        if accepted.shape != rows.shape:
            raise KvtideError(f"num_accepted has shape {accepted.shape}; step {step.number} has {len(rows)} rows")
        wrong = np.flatnonzero((accepted < 0) | (accepted > tokens) | (gaps & (accepted < tokens)))
        if len(wrong):
            at = int(wrong[0])
            raise KvtideError(
                f"row {int(rows[at])} commits {int(accepted[at])} tokens of {int(tokens[at])} reserved"
                + (", some of which had no slot and cannot be rejected" if gaps[at] else "")
            )
        ids = np.frombuffer(as_token_bytes([] if token_ids is None else token_ids), dtype="<i4")
        unseen = np.maximum(self.committed[rows] + accepted - np.maximum(self._known[rows], self.committed[rows]), 0)
        if self._caching and len(ids) != int(unseen.sum()):
            raise KvtideError(
                f"token_ids has {len(ids)} tokens; the rows have {int(unseen.sum())} that were not seen before"
            )
        kept = np.clip(accepted - (tokens - drafts), 0, None)
        return step, tokens, (drafts, kept), ids

    def _learn(self, rows: Int64Array, committed: Int64Array, accepted: Int64Array, ids: npt.NDArray[np.int32]) -> None:
        """Extend the chains of rows by tokens that were not seen before."""
        if not len(ids):
            return
        known = self._known[rows]
        counts = np.maximum(committed + accepted - known, 0)
        filled = known % self.base
        if len(ids) == len(rows) and counts.min() == 1:
            owners, places = np.arange(len(rows)), filled  # one token each, as in most decode steps
        else:
            owners = np.repeat(np.arange(len(rows)), counts)
            places = filled[owners] + ranges(counts)
        inside = places < self.base
        self._tail[rows[owners[inside]], places[inside]] = ids[inside]
        self._known[rows] = known + counts

        whole = np.flatnonzero(filled + counts >= self.base)
        blocks = self._tail[rows[whole]].tobytes()
        size = 4 * self.base
        for number, row in enumerate(rows[whole].tolist()):
            chain = self._chain[row]
            assert chain is not None
            chain.add_block(blocks[number * size : (number + 1) * size])
        ends = np.cumsum(counts)
        for i in np.flatnonzero(filled + counts > self.base).tolist():
            row = int(rows[i])
            chain = self._chain[row]
            assert chain is not None
            more = ids[ends[i] - counts[i] + self.base - filled[i] : ends[i]]
            chain.extend(more.tobytes())
            rest = len(more) % self.base
            self._tail[row, :rest] = more[len(more) - rest :]

    def _register(self, rows: Int64Array, committed: Int64Array) -> None:
        """Give keys to the base blocks that have become whole, and put the rows' blocks under them."""
        whole = committed // self.base
        fresh = np.flatnonzero(whole > self._registered[rows])
        if not len(fresh):
            return
        rows, whole = rows[fresh], whole[fresh]
        before = self._registered[rows]
        keys: list[bytes] = []
        for row, begin, end in zip(rows.tolist(), before.tolist(), whole.tolist(), strict=True):
            chain = self._chain[row]
            assert chain is not None
            keys += chain.keys[begin:end]
        counts = whole - before
        owners = np.repeat(rows, counts)
        numbers = np.repeat(before, counts) + ranges(counts)
        nodes = self.index.nodes_for(keys)
        for group in self.groups:
            if group.is_state or group.is_cross:
                continue
            which, columns, ids = group.blocks_of_keys(owners, numbers)
            self.pool.set_cached(self.index.insert(group.number, nodes[which], columns, ids))
        # A node can stay empty: a state-only model, or tokens that never had a block.
        self.index.forget_empty(nodes)
        self._registered[rows] = whole

    def _slide(self, group: ManagedGroup, rows: Int64Array, committed: Int64Array) -> None:
        first = group.first_block(committed)
        moved = np.flatnonzero(first > group.table.first[rows])
        if not len(moved):
            return
        rows, first = rows[moved], first[moved]
        owners, logical, ids = group.table.slide(rows, first)
        self._changed[group.number, rows] = True
        slack = (group.fmt.group.spec.reach or 0) + max(JUNCTION_SLACK, 2 * self.base)
        near_end = (logical + 1) * group.fmt.block_size > self._prompt[owners] - slack
        classes = np.where(near_end, self._class[owners], CLASS_SCRAP).astype(np.uint8)
        flat = ids.T.ravel()
        self._release_shared(flat, self._classes(flat, np.repeat(classes, group.fmt.tables)))

    def _release_shared(self, ids: Int64Array, classes: npt.NDArray[np.uint8]) -> None:
        """Release blocks of several rows, which may hold one and the same block."""
        # A block that two rows hold has two references.
        while len(ids) and self.pool.refs[ids].max() > 1:
            _, once = np.unique(ids, return_index=True)
            once.sort()
            self.pool.release(ids[once], classes[once])
            ids, classes = np.delete(ids, once), np.delete(classes, once)
        if len(ids):
            self.pool.release(ids, classes)

    def _classes(self, ids: Int64Array, classes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Eviction classes; blocks of groups that only a drafter has go first, whatever their row's priority."""
        if self._draft_groups:
            owners = self.pool.owner[ids // self.pool.stride]
            classes = np.where(np.isin(owners, self._draft_groups), CLASS_SCRAP, classes).astype(np.uint8)
        return classes

    def _state_copies(self, rows: Int64Array) -> list[Copy]:
        """Copies that bring a hit's checkpoints into the running states; their sources stay pinned until the commit."""
        copies: list[Copy] = []
        if not self._sources:
            return copies
        for row in rows.tolist():
            for number, ids in self._sources.get(row, {}).items():
                table = self.groups[number].table
                if table.end[row]:
                    copies.append(
                        Copy(self.groups[number].name, table.to_entries(ids), table.entries[:, row, 0].copy())
                    )
        return copies

    def _settle_states(self, rows: Int64Array, accepted: Int64Array) -> None:
        """Drop the pins of restored checkpoints, and make the state after the last accepted token the running one."""
        for row in rows.tolist() if self._sources else ():
            for ids in self._sources.pop(row, {}).values():
                self.pool.release(ids, int(self._class[row]))
        if not self.lookahead:
            return
        for group in self.groups:
            if group.is_state:
                chosen = np.flatnonzero((accepted > 1) & (accepted <= 1 + self.lookahead))
                owners, columns = rows[chosen], accepted[chosen] - 1
                entries = group.table.entries
                running = entries[:, owners, 0].copy()
                entries[:, owners, 0] = entries[:, owners, columns]
                entries[:, owners, columns] = running
                self._changed[group.number, owners] = True

    def _forget_blocks(self, ids: Int64Array) -> None:
        self.index.remove(ids)

    def _exhausted(self, needs: Sequence[int]) -> Exhausted:
        shortfall = {
            group.name: short
            for group, need in zip(self.groups, needs, strict=True)
            if (short := need - self.pool.spare_blocks(group.number)) > 0
        }
        pages = self.pool.pages_short(needs)
        would_free = {row: self.blocks_freed_by(row) for row in np.flatnonzero(self._running).tolist()}
        wanted = ", ".join(f"{count} blocks of {name}" for name, count in shortfall.items())
        return Exhausted(f"{wanted} need {pages} more pages than can be had", shortfall, pages, would_free)

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def tables(self) -> Mapping[str, GroupTable]:
        """Block tables by group name."""
        return {group.name: group.table for group in self.groups}

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

    def blocks_freed_by(self, row: int) -> dict[str, int]:
        """Blocks per group that only this row holds: what preempting it would give back."""
        freed = {}
        for group in self.groups:
            _, entries = group.table.held(row)
            ids = group.table.to_ids(entries[entries >= 0])
            freed[group.name] = int((self.pool.refs[ids] == 1).sum())
        return freed

    def check(self) -> None:
        """All invariants, recomputed from scratch; `AssertionError` on the first that does not hold. For tests."""
        self.pool.check()
        self.index.check(np.flatnonzero(self.pool.cached))
        expected = np.zeros_like(self.pool.refs)
        for row in np.flatnonzero(self._running).tolist():
            for group in self.groups:
                _, entries = group.table.held(row)
                ids = group.table.to_ids(entries[entries >= 0])
                assert (self.pool.owner[ids // self.pool.stride] == group.number).all(), "a table holds another's block"
                np.add.at(expected, ids, 1)
                if group.is_bounded:
                    first = max(int(group.first_block(self.committed[row : row + 1])[0]), group.table.sink_blocks)
                    assert int(group.table.first[row]) == first, "a window has slid too far, or not far enough"
        for sources in self._sources.values():
            for ids in sources.values():
                np.add.at(expected, ids, 1)
        for _, ids, _ in self._limbo:
            np.add.at(expected, ids, 1)
        for ids in self._holding:
            np.add.at(expected, ids, 1)
        assert (expected == self.pool.refs).all(), "references and holders differ"

    def _check_running(self, row: int) -> None:
        if not 0 <= row < self.max_requests or not self._running[row]:
            raise KvtideError(f"row {row} is not running")

    def _make_group(self, number: int, pin_memory: bool) -> ManagedGroup:
        fmt = self.geometry.formats[number]
        spec = fmt.group.spec
        size = fmt.block_size
        sink_blocks = -(-spec.sinks // size) if isinstance(spec, SinkWindow) else 0
        if not size:
            width = 1 + self.lookahead
        else:
            longest = self.max_model_len + self.lookahead
            if spec.reach is not None:
                longest = min(longest, spec.reach + self.max_step_tokens * self.max_steps_in_flight + self.lookahead)
            # A span that starts inside a block can touch one block more than its length alone.
            width = sink_blocks + -(-longest // size) + 1
        drafts = {layer.index for layer in self.geometry.layout.layers if layer.draft}
        table = GroupTable(
            fmt,
            self.max_requests,
            width,
            sink_blocks=sink_blocks,
            stride=self.pool.stride,
            page_units=self.geometry.page_bytes // self.geometry.unit,
            unit=self.geometry.unit,
            pin_memory=pin_memory,
        )
        return ManagedGroup(number, fmt, table, self.base, draft_only=set(fmt.group.layers) <= drafts)


def _base_block(geometry: PageGeometry) -> int:
    """Tokens per key: the smallest block of the groups that need every token, or of all when there are none."""
    sizes = [fmt.block_size for fmt in geometry.formats if fmt.block_size]
    whole = [fmt.block_size for fmt in geometry.formats if fmt.block_size and not fmt.group.spec.has_bounded_reach]
    base = min(whole or sizes, default=16)
    for fmt in geometry.formats:
        if fmt.block_size and fmt.block_size % base and base % fmt.block_size:
            raise ConfigError(
                f"the block of group {fmt.group.name} has {fmt.block_size} tokens, which neither divides the base "
                f"block of {base} tokens nor is a multiple of it"
            )
    return base
