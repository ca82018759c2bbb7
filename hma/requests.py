"""A request comes, waits and goes: rows, prefix hits, and in which order blocks are given back."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import ConfigError, Exhausted, KvtideError
from kvtide.kvcache.specs import Int64Array

from .core import ManagerCore
from .hashing import Item, as_token_bytes, namespace
from .plans import Admission
from .pool_state import CLASS_NORMAL
from .steps import Parting

# Tokens behind the window that a prompt's end keeps at full value, so that a prompt which parts a little earlier still
# finds its window; never less than two base blocks.
JUNCTION_SLACK = 512
PRIORITIES = (-3, 3)


class RequestCalls(ManagerCore):
    """Requests are in rows: running ones hold blocks, preempted ones only their row."""

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
