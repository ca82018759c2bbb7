"""The scheduler's half of the vLLM bridge: which tokens the store may serve, and which blocks are worth storing.

    matched ──► look-up to the workers ──► answer ──► matched says how many tokens ──► allocated ──► load
    step    ──► blocks that became whole in this step ──► save        finished ──► what is left, and the last windows

It knows tokens, chain hashes and block numbers, and nothing of the store. Only blocks of tokens that are decided are
stored: vLLM's chain hashes exist for those alone, so a draft that was not accepted has no key. Windows are stored where
a later prompt may join: at the end of the prompt, where the request ends, where the store's full-attention blocks of
this prompt ended, and every `window_interval` tokens. Recurrent states are stored where vLLM has kept one: all of a
prompt's, and of what follows one every `window_interval` tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import Protocol

from kvtide.offload.keys import CHAIN_BYTES

from .groups import Group, alignment
from .messages import Answer, Block, FromWorker, Load, LookUp, Save, Served, ToWorker

_DEFAULT_WINDOWS = 4
_NULL_BLOCK = 0  # vLLM's placeholder in tables, where a block is not needed


class Request(Protocol):
    """What is read of vLLM's `Request`."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_tokens: int
    block_hashes: Sequence[bytes]
    cache_salt: str | None
    skip_reading_prefix_cache: bool


@dataclass
class _Look:
    """A look-up on its way or answered. `asked`: the tokens that the device had when vLLM last asked."""

    start: int
    asked: int
    limit: int
    ticket: int
    expires: float
    answer: Answer | None = None
    done: bool = False


@dataclass
class _Tracked:
    """One request. `saved`, `windows`: tokens up to which blocks, and window boundaries, have been dealt with."""

    request: Request
    saved: int = 0
    windows: int = 0
    reach: int = 0  # tokens that scheduled steps have computed, drafts included
    admitted: bool = False  # allocated since the last step
    failed: bool = False
    junctions: set[int] = field(default_factory=set)
    stored_windows: set[int] = field(default_factory=set)
    look: _Look | None = None


class SchedulerSide:
    """One engine's. `hash_block` is vLLM's tokens a hash; `num_workers` is how many answer each look-up."""

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        hash_block: int,
        num_workers: int,
        loads: bool,
        stores: bool,
        window_interval: int | None,
        look_up_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.groups = list(groups)
        self.counts: Counter[str] = Counter()
        self._align = alignment(groups)
        self._hash_block = hash_block
        self._num_workers = num_workers
        self._loads = loads
        self._stores = stores
        reaches = [group.reach for group in groups]
        every = _DEFAULT_WINDOWS * max(reaches) if window_interval is None else window_interval
        self._interval = -(-every // self._align) * self._align
        self._has_windows = any(group.reach and not group.is_state for group in groups)
        self._timeout = look_up_timeout_s
        self._clock = clock
        self._epoch = b""
        self._tickets = 0
        self._tracked: dict[str, _Tracked] = {}
        self._looks: dict[int, str] = {}
        self._next = ToWorker()

    def added(self, request: Request) -> None:
        """A request that vLLM has taken."""
        self._track(request)

    def matched(self, request: Request, num_computed: int) -> int | None:
        """Tokens beyond `num_computed` that the store can serve; None: not known yet, ask again."""
        tracked = self._track(request)
        limit = min(request.num_tokens - 1, len(request.block_hashes) * self._hash_block) // self._align * self._align
        if not self._loads or tracked.failed or request.skip_reading_prefix_cache or limit <= num_computed:
            return 0
        look = tracked.look
        if look is None or look.start > num_computed:  # the device has given up blocks since
            self._ask(tracked, num_computed, limit)
            return None
        look.asked = num_computed
        if not look.done:
            if self._clock() < look.expires:
                return None
            self.counts["look_up_late"] += 1
            self._looks.pop(look.ticket, None)  # what is answered from now on is no news
            look.done, look.answer = True, Answer(0, 0)
        assert look.answer is not None
        return max(0, look.answer.end - num_computed)

    def allocated(self, request: Request, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        """vLLM has given a request its blocks; with `num_external` the load of so many tokens starts."""
        tracked = self._track(request)
        tracked.admitted = True
        look, tracked.look = tracked.look, None
        if look is not None and look.answer is not None and look.answer.run > look.start:
            tracked.junctions.add(look.answer.run)
        if num_external == 0:
            if look is not None:
                self._looks.pop(look.ticket, None)
                self._next.over.append(request.request_id)
            return
        assert look is not None  # `matched` has promised these tokens
        tracked.reach = 0
        start, end = look.asked, look.asked + num_external
        blocks = []
        for group in self.groups:
            first = max(start // group.block_size, group.first_block(end))
            blocks.append(self._blocks(tracked, group, block_ids, range(first, end // group.block_size)))
        self.counts["look_up_tokens"] += num_external
        self._next.loads.append(Load(request.request_id, blocks))

    def step(
        self,
        num_scheduled: Mapping[str, int],
        block_ids: Callable[[str], Sequence[Sequence[int]]],
        states: Mapping[str, Sequence[tuple[int, int, int]]] = MappingProxyType({}),
    ) -> ToWorker:
        """The workers' work of this step, given the tokens it computes and the requests' block tables.

        `states` are recurrent states that are there when the step is over: by request, (group, block, tokens).
        """
        for req_id, count in num_scheduled.items():
            tracked = self._tracked.get(req_id)
            if tracked is not None:
                self._scheduled(tracked, count, block_ids)
        for req_id, offered in states.items():
            tracked = self._tracked.get(req_id)
            if tracked is not None and self._stores:
                self._keep_states(tracked, offered)
        work, self._next = self._next, ToWorker()
        work.idle = not num_scheduled
        return work

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]], *, sound: bool) -> bool:
        """A request is over; whether its blocks must stay until the workers have copied them."""
        tracked = self._tracked.pop(request.request_id, None)
        self._next.over.append(request.request_id)
        if tracked is None:
            return False
        if tracked.look is not None:
            self._looks.pop(tracked.look.ticket, None)
        done = min(self._decided(request), request.num_computed_tokens, tracked.reach)
        if not self._stores or not sound or done <= 0:
            return False
        blocks = self._whole(tracked, done, block_ids, last=True)
        self._next.served.append(Served(done, sorted(tracked.stored_windows), self._chains(request, done)))
        if not any(blocks):
            return False
        self._next.saves.append(Save(request.request_id, blocks, request.cache_salt or "", last=True))
        return True

    def heard(self, news: FromWorker) -> None:
        """What the workers said after a step."""
        self.counts.update(news.counts)
        for req_id in news.failed:
            if req_id in self._tracked:
                self._tracked[req_id].failed = True  # it is computed, not asked for again
        for ticket, answer in news.answers.items():
            tracked = self._tracked.get(self._looks.get(ticket, ""))
            look = None if tracked is None else tracked.look
            if tracked is None or look is None or look.ticket != ticket:
                continue
            look.answer = answer if look.answer is None else look.answer.merge(answer)
            if look.answer.count < self._num_workers:
                continue
            del self._looks[ticket]
            if look.answer.agree:
                look.done = True
            else:  # what the shortest can serve need not be a length that all can
                self._ask(tracked, look.start, max(look.answer.end, look.start), expires=look.expires)

    def forget(self) -> None:
        """From now on nothing that was stored before is found: the weights are about to change."""
        self._epoch = time.time_ns().to_bytes(16, "little")
        for tracked in self._tracked.values():
            tracked.look = None
            tracked.saved = tracked.windows = 0
        self._looks.clear()

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = _Tracked(request)
            whole = request.num_prompt_tokens // self._align * self._align
            # The same prompt again can hit up to the block before its last token; a longer one up to its last block.
            tracked.junctions.update({whole, (request.num_prompt_tokens - 1) // self._align * self._align})
        return tracked

    def _ask(self, tracked: _Tracked, start: int, limit: int, *, expires: float | None = None) -> None:
        if tracked.look is not None:
            self._looks.pop(tracked.look.ticket, None)
        self._tickets += 1
        expires = self._clock() + self._timeout if expires is None else expires
        tracked.look = _Look(start, start, limit, self._tickets, expires)
        self._looks[self._tickets] = tracked.request.request_id
        chains = self._chains(tracked.request, limit)
        self._next.look_ups.append(LookUp(self._tickets, tracked.request.request_id, start, limit, chains))

    def _scheduled(self, tracked: _Tracked, count: int, block_ids: Callable[[str], Sequence[Sequence[int]]]) -> None:
        request = tracked.request
        computed = request.num_computed_tokens
        if tracked.admitted:  # what it begins with was stored when it was computed, or came from the store
            tracked.admitted = False
            tracked.saved = max(tracked.saved, computed)
            tracked.windows = max(tracked.windows, computed)
        tracked.reach = computed + count
        done = min(tracked.reach, self._decided(request))
        if not self._stores or done // self._align == tracked.saved // self._align:
            return
        blocks = self._whole(tracked, done, block_ids(request.request_id))
        if any(blocks):
            self._next.saves.append(Save(request.request_id, blocks, request.cache_salt or ""))

    def _keep_states(self, tracked: _Tracked, offered: Sequence[tuple[int, int, int]]) -> None:
        request = tracked.request
        blocks: list[list[Block]] = [[] for _ in self.groups]
        for index, block, tokens in offered:
            is_wanted = tokens <= request.num_prompt_tokens or (self._interval and tokens % self._interval == 0)
            if block == _NULL_BLOCK or tokens % self._align or tokens > self._decided(request) or not is_wanted:
                continue
            for found, group in zip(blocks, self.groups, strict=True):
                if group.index == index and group.is_state:
                    found.append((self._chain(request, group.block_size, tokens // group.block_size - 1), block))
        if any(blocks):
            self._next.saves.append(Save(request.request_id, blocks, request.cache_salt or ""))

    def _decided(self, request: Request) -> int:
        """Tokens that are the request's for good, and have chain hashes."""
        return min(request.num_tokens, len(request.block_hashes) * self._hash_block)

    def _whole(
        self, tracked: _Tracked, done: int, block_ids: Sequence[Sequence[int]], *, last: bool = False
    ) -> list[list[Block]]:
        """Blocks to store now that `done` tokens are computed; `last`: no more will be."""
        boundaries = self._boundaries(tracked, done, last=last) if self._has_windows else []
        blocks = []
        for group in self.groups:
            size = group.block_size
            if group.is_full:
                blocks.append(self._blocks(tracked, group, block_ids, range(tracked.saved // size, done // size)))
                continue
            wanted: set[int] = set()  # of states none: a table does not say where they are
            for boundary in () if group.is_state else boundaries:
                window = range(group.first_block(boundary), boundary // size)
                table = block_ids[group.index]
                if len(table) >= window.stop and _NULL_BLOCK not in table[window.start : window.stop]:
                    wanted.update(window)  # else a part of it has left the window of the tokens after it
            blocks.append(self._blocks(tracked, group, block_ids, sorted(wanted)))
        tracked.saved = max(tracked.saved, done)
        tracked.windows = max(tracked.windows, done)
        return blocks

    def _boundaries(self, tracked: _Tracked, done: int, *, last: bool) -> list[int]:
        """Lengths whose windows are to be stored now."""
        found = {at for at in tracked.junctions if tracked.windows < at <= done}
        if self._interval:
            first = tracked.windows // self._interval + 1
            found.update(at * self._interval for at in range(first, done // self._interval + 1))
        if last:
            found.add(done // self._align * self._align)
        found -= tracked.stored_windows
        tracked.stored_windows |= found
        return sorted(found)

    def _blocks(
        self, tracked: _Tracked, group: Group, block_ids: Sequence[Sequence[int]], places: Iterable[int]
    ) -> list[Block]:
        table = block_ids[group.index]
        return [
            (self._chain(tracked.request, group.block_size, at), table[at])
            for at in places
            if at < len(table) and table[at] != _NULL_BLOCK
        ]

    def _chains(self, request: Request, num_tokens: int) -> dict[int, bytes]:
        """The joined chain hashes of the whole blocks of a length, by tokens a block."""
        return {
            size: b"".join(self._chain(request, size, at) for at in range(num_tokens // size))
            for size in {group.block_size for group in self.groups}
        }

    def _chain(self, request: Request, block_size: int, at: int) -> bytes:
        """The chain hash of the tokens up to the end of a block."""
        whole = request.block_hashes[(at + 1) * block_size // self._hash_block - 1]
        return blake2b(whole, digest_size=CHAIN_BYTES, key=self._epoch, person=b"kvtide-vllm").digest()
