"""A step: blocks are taken when it is reserved; when it is committed full blocks are cached and dead ones given back.

Both look at whole batches. A row that stays inside its blocks costs a comparison, and nothing else.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import KvtideError
from kvtide.kvcache.specs import Int64Array

from .groups import ManagedGroup
from .hashing import as_tokens
from .plans import Copy, Reservation
from .pool_state import CLASS_SCRAP
from .requests import RequestCalls
from .sequences import FreshKeys
from .steps import Step, whole_numbers
from .tables import ranges


class StepCalls(RequestCalls):
    """Reserve, commit, and what recurrent states need around them."""

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
        sure = None
        if kv_from_activations:
            # Drafts, of this step and of those in flight, may all be rejected: what is dead must be dead without them.
            sure = upper - self._steps.drafts_in_flight[rows] - (0 if drafts is None else drafts)
        if self.lookahead:
            upper += self.lookahead
        has_gap = None
        short = (upper > self._covered[rows]).nonzero()[0]
        if self._states and self.lookahead and self._steps.in_flight[rows].any():
            raise KvtideError("recurrent states with drafts need each step committed before the next is reserved")
        if len(short):
            self._check_length(rows[short], upper[short])
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
        blocks can be found from now on, windows slide, dead blocks go back. `KvtideError` for anything that does not
        match the step: then nothing has changed.
        """
        rows = whole_numbers("rows", rows)
        accepted = whole_numbers("num_accepted", num_accepted)
        step = self._steps.oldest(rows, accepted)
        if self._states:
            self._check_states(step, accepted)
        committed = self.committed[rows] + accepted
        if self._cache.enabled:
            self._sequences.learn(rows, committed, as_tokens([] if token_ids is None else token_ids))
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

    # -- inside a step ------------------------------------------------------------------------------------------------

    def _check_length(self, rows: Int64Array, upper: Int64Array) -> None:
        after = upper - self.lookahead
        if after.max(initial=0) > self.max_model_len:
            at = int(after.argmax())
            raise KvtideError(
                f"row {int(rows[at])} would have {int(after[at])} tokens; max_model_len is {self.max_model_len}"
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
        covered = np.full(len(rows), self.max_model_len + self.lookahead)
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

    # -- recurrent states ---------------------------------------------------------------------------------------------

    def _check_states(self, step: Step, accepted: Int64Array) -> None:
        """A step keeps the state after each of its tokens if `lookahead` has room for them, else after the last one."""
        lost = (accepted == 0) | ((accepted < step.num_tokens) & (step.num_tokens > 1 + self.lookahead))
        if lost.any():
            at = int(lost.argmax())
            raise KvtideError(
                f"row {int(step.rows[at])} commits {int(accepted[at])} of {int(step.num_tokens[at])} tokens, but its "
                "recurrent state after them was not kept; preempt it to begin again from a checkpoint"
            )

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
