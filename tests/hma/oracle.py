"""An independent, slow, obvious allocator, and an engine that drives it and the real manager side by side.

Nothing here is shared with `hma`. When whole blocks are put under their keys is the manager's choice (it puts it off
while nobody could notice); the oracle only reads how far each row has come, and expects of every look-up what it would
find if nothing were put off. A sequence is a chain of numbers: the *prefix number* of position p stands for the
namespace and all tokens (and multimodal items) up to p, so two slots hold the same content exactly when their numbers
are equal. Per request and group there is a dictionary of the logical blocks it must hold, filled token by token with
the masks of the papers (`layouts.sees`); a block is dropped when no query from here on sees any of its tokens.

`Engine` calls the manager and the oracle with the same operations, plays the device (it writes prefix numbers through
the tables it would have on the device, copying only the rows that a plan names as changed; steps run in order, some
when they are reserved and some as late as their commit), and after every operation compares tables, hits, counts,
references, cached content and page ownership. A block that changes hands is poisoned, so stale reads are seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from layouts import sees

from kvtide.hma import HybridMemoryManager, Item
from kvtide.kvcache import ChunkedLocal, CrossAttention, Exhausted, RecurrentState, SinkWindow, SlidingWindow
from kvtide.kvcache.geometry import BlockFormat, PageGeometry
from kvtide.kvcache.specs import LayerSpec, SlidingWindowMLA

POISON = -1
ZERO_STATE = -2

Entry = int
Place = tuple[int, int]  # (table, logical block)
# (group, table, end of the block, prefix number at the end of its base block): a base block is cached under one key.
CacheKey = tuple[int, int, int, int]


class Prefixes:
    """Numbers of token prefixes; equal numbers mean equal namespace, tokens and items."""

    def __init__(self) -> None:
        self._next: dict[tuple[Any, ...], int] = {}
        self.parent: list[int] = []
        self.depth: list[int] = []

    def root(self, *namespace: object) -> int:
        return self._number(("root", *namespace), POISON, 0)

    def extend(self, prefix: int, token: int, digests: tuple[bytes, ...] = ()) -> int:
        return self._number((prefix, token, digests), prefix, self.depth[prefix] + 1)

    def _number(self, key: tuple[Any, ...], parent: int, depth: int) -> int:
        if key not in self._next:
            self._next[key] = len(self.parent)
            self.parent.append(parent)
            self.depth.append(depth)
        return self._next[key]


@dataclass(eq=False)
class Request:
    """What the engine and the oracle know of one request. `chain[p]` is the prefix number of token p."""

    name: str
    prompt: list[int]
    root: int
    items: list[Item]
    image_tokens: int
    tokens: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)
    row: int = -1
    running: bool = False
    life: int = 0
    committed: int = 0  # as the manager knows it
    computed: int = 0  # as the device knows it: steps that have run count, committed or not
    known: int = 0  # tokens the manager has been told
    registered: int = 0
    # Whole blocks that the manager may not have put under their keys yet.
    waiting: dict[CacheKey, Entry] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    held: dict[int, dict[Place, Entry]] = field(default_factory=dict)
    sources: dict[int, list[Entry]] = field(default_factory=dict)
    restored: bool = False
    loading: Loading | None = None

    def digests(self, position: int) -> tuple[bytes, ...]:
        return tuple(sorted(item.digest for item in self.items if item.position == position))


@dataclass(eq=False)
class Loading:
    """A load under way: its length, the places `(group, table, block)` to fill, and the checkpoints it ends at."""

    length: int
    missing: dict[tuple[int, int, int], Entry]
    states: dict[int, list[Entry]]


@dataclass(eq=False)
class Growth:
    """What one row must take in a step: logical blocks and the new end per group; `has_gap` if some get no slot."""

    start: int
    blocks: dict[int, list[int]]
    ends: dict[int, int]
    has_gap: bool


@dataclass(eq=False)
class Member:
    """One row of a step in flight."""

    request: Request
    life: int
    num_tokens: int
    num_drafts: int
    start: int
    has_gap: bool
    fraction: float
    tables: dict[int, dict[Place, Entry]]
    accepted: int = -1

    @property
    def alive(self) -> bool:
        return self.request.running and self.request.life == self.life


@dataclass(eq=False)
class Step:
    number: int
    members: list[Member]
    copies: list[tuple[int, list[Entry], list[Entry]]]
    from_activations: bool
    has_run: bool = False


class Engine:
    """Drives a manager and the oracle; every method checks what the manager did. `AssertionError` on a difference.

    With `skips` some steps may read from activations; then only drafts are ever rejected. Without, any tokens are.
    """

    def __init__(
        self, geometry: PageGeometry, num_pages: int, *, max_model_len: int = 64, skips: bool = True, **options: Any
    ) -> None:
        self.geometry = geometry
        self.formats: tuple[BlockFormat, ...] = geometry.formats
        self.unit, self.page_bytes = geometry.unit, geometry.page_bytes
        self.block_bytes = [fmt.block_bytes for fmt in self.formats]
        self.per_page = [fmt.blocks_per_page for fmt in self.formats]
        self.num_pages = num_pages
        self.max_model_len = max_model_len
        self.skips = skips
        self.lookahead: int = options.get("lookahead", 0)
        self.caching: bool = options.get("prefix_caching", True)
        self.drop_last: bool = options.get("drop_last_block", False)
        self.max_step_tokens: int = options.setdefault("max_step_tokens", 24)
        self.max_steps: int = options.get("max_steps_in_flight", 2)
        self.manager = HybridMemoryManager(
            geometry, num_pages * geometry.page_bytes, max_model_len=max_model_len, **options
        )
        self.stride = max(self.per_page)
        self.base = self._base()
        self.prefixes = Prefixes()
        self.requests: dict[str, Request] = {}
        self.unknown_images = 0
        self.steps: list[Step] = []
        self.limbo: list[tuple[int, list[tuple[int, Entry]]]] = []
        self.cached: dict[CacheKey, Entry] = {}
        self.places: dict[tuple[int, Entry], CacheKey] = {}  # the same, by group and entry
        self.put: dict[CacheKey, set[Entry]] = {}  # blocks of rows that left since the last comparison
        self.device: dict[tuple[int, int], dict[Place, Entry]] = {}
        self.pages: dict[int, tuple[int, dict[Entry, list[int]]]] = {}
        self.table_of: dict[tuple[int, Entry], int] = {}
        self.accepted_drafts = self.drafted = self.operations = self.hits = self.exhausted = self.garbage = 0

    # -- what the oracle knows of layers ------------------------------------------------------------------------------

    def _base(self) -> int:
        """Tokens per key: the smallest block that every token needs; cross attention is not cached."""
        sizes = [(fmt.block_size, _is_bounded(fmt.group.spec)) for _, fmt in self._attention()]
        return min([size for size, bounded in sizes if not bounded] or [size for size, _ in sizes], default=16)

    @property
    def has_states(self) -> bool:
        return any(not fmt.block_size for fmt in self.formats)

    def is_dead(self, group: int, block: int, query: int) -> bool:
        """Whether no query from `query` on sees any token of the block."""
        fmt = self.formats[group]
        spec = fmt.group.spec
        tokens = range(block * fmt.block_size, (block + 1) * fmt.block_size)
        return _is_bounded(spec) and all(k < query and not sees(spec, query, k) for k in tokens)

    def live_blocks(self, group: int, length: int) -> list[int]:
        """Logical blocks of `length` stored tokens that the query at `length` or a later one can see."""
        size = self.formats[group].block_size
        return [b for b in range(-(-length // size)) if not self.is_dead(group, b, length)]

    def _attention(self) -> Iterator[tuple[int, BlockFormat]]:
        for number, fmt in enumerate(self.formats):
            if fmt.block_size and not isinstance(fmt.group.spec, CrossAttention):
                yield number, fmt

    def _states(self) -> Iterator[tuple[int, BlockFormat]]:
        for number, fmt in enumerate(self.formats):
            if not fmt.block_size:
                yield number, fmt

    # -- hits ---------------------------------------------------------------------------------------------------------

    def serves(self, request: Request, length: int, findable: set[CacheKey]) -> dict[int, bool]:
        """Per cached group whether it could serve a hit of `length`."""
        answer = {}
        for group, fmt in self._attention():
            answer[group] = length % fmt.block_size == 0 and all(
                self.key(request, group, table, (block + 1) * fmt.block_size) in findable
                for block in self.live_blocks(group, length)
                for table in range(fmt.tables)
            )
        for group, fmt in self._states():
            answer[group] = all(self.key(request, group, table, length) in findable for table in range(fmt.tables))
        return answer

    def findable(self) -> set[CacheKey]:
        """Keys that a look-up finds: those that wait are put in time."""
        return set(self.cached).union(*(request.waiting for request in self.requests.values()))

    def key(self, request: Request, group: int, table: int, end: int) -> CacheKey:
        """What the block (or state) that ends at `end` is cached under."""
        return group, table, end, request.chain[-(-end // self.base) * self.base - 1]

    def expected_hit(self, request: Request) -> int:
        limit = request.known if request.known > len(request.prompt) else request.known - 1
        if not self.caching:
            return 0
        findable = self.findable()
        if not any(key[3] in request.chain[:limit] for key in findable):
            return 0  # where no group needs anything (a chunk's start), something must still be known of the prefix
        lengths = range(self.base, limit + 1, self.base)
        good = [n for n in lengths if (s := self.serves(request, n, findable)) and all(s.values())]
        if self.drop_last:
            good = good[:-1]
        return good[-1] if good else 0

    # -- the engine's calls -------------------------------------------------------------------------------------------

    def admit(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        salt: str = "",
        adapter: str = "",
        items: Sequence[Item] = (),
        image_tokens: int = 0,
        priority: int = 0,
    ) -> Request:
        root = self.prefixes.root(salt, adapter)
        if image_tokens and not items and any(isinstance(f.group.spec, CrossAttention) for f in self.formats):
            # Nobody said which images these are, so they are like no others.
            self.unknown_images += 1
            root = self.prefixes.root(salt, f"{adapter} unknown images {self.unknown_images}")
        request = Request(name, list(prompt), root, sorted(items), image_tokens, known=len(prompt))
        self.extend(request, prompt)
        expected = self.expected_hit(request)
        admission = self.manager.admit(
            name,
            np.array(prompt),
            salt=salt,
            adapter=adapter,
            items=items,
            image_tokens=image_tokens,
            priority=priority,
        )
        request.row = admission.row
        self.requests[name] = request
        self._start(request, expected, admission.num_cached_tokens, admission.limited_by)
        return request

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        for token in tokens:
            last = request.chain[-1] if request.chain else request.root
            request.chain.append(self.prefixes.extend(last, token, request.digests(len(request.tokens))))
            request.tokens.append(token)

    def resume(self, name: str) -> None:
        request = self.requests[name]
        expected = self.expected_hit(request)
        admission = self.manager.resume(request.row)
        assert admission.row == request.row
        self._start(request, expected, admission.num_cached_tokens, admission.limited_by)

    def _start(self, request: Request, expected: int, got: int, limited_by: tuple[str, ...]) -> None:
        assert got == expected, f"hit of {got} tokens, {expected} expected"
        self._settle(request)
        self._compare_cache(self._put())
        request.running = True
        request.life += 1
        request.restored = False
        request.committed = request.computed = got
        request.registered = got // self.base
        request.ends = dict.fromkeys(range(len(self.formats)), 0)
        request.held = {g: {} for g in range(len(self.formats))}
        request.sources = {}
        self.hits += got > 0
        if got:
            self._check_limits(request, got, limited_by)
            for group, fmt in self._attention():
                request.ends[group] = got // fmt.block_size
                request.held[group] = {
                    (table, block): self.cached[self.key(request, group, table, (block + 1) * fmt.block_size)]
                    for block in self.live_blocks(group, got)
                    for table in range(fmt.tables)
                }
            for group, fmt in self._states():
                request.sources[group] = [
                    self.cached[self.key(request, group, table, got)] for table in range(fmt.tables)
                ]
        self.compare()

    def _check_limits(self, request: Request, got: int, limited_by: tuple[str, ...]) -> None:
        names = {fmt.group.name: group for group, fmt in enumerate(self.formats)}
        longest = request.known if request.known > len(request.prompt) else request.known - 1
        if got + self.base <= longest and not self.drop_last:
            serves = self.serves(request, got + self.base, self.findable())
            assert set(limited_by) == {name for name, group in names.items() if serves.get(group) is False}

    def preempt(self, name: str) -> None:
        request = self.requests[name]
        self.manager.preempt(request.row)
        self._leave(request)
        self.compare()

    def release(self, name: str) -> None:
        request = self.requests.pop(name)
        self.manager.release(request.row)
        if request.running:
            self._leave(request)
        self.compare()

    def _leave(self, request: Request) -> None:
        waiting = [step.number for step in self.steps for member in step.members if member.request.row == request.row]
        in_flight = any(member.request is request and member.alive for step in self.steps for member in step.members)
        blocks = [(group, entry) for group, places in request.held.items() for entry in places.values()]
        blocks += [(group, entry) for group, entries in request.sources.items() for entry in entries]
        self._settle(request)
        request.running, request.loading = False, None
        request.committed = request.computed = request.registered = 0
        request.held, request.sources, request.ends = {}, {}, {}
        if in_flight:
            self.limbo.append((max(waiting), blocks))

    def can_reserve(self, name: str) -> bool:
        """States with drafts refuse a second step in flight."""
        request = self.requests[name]
        in_flight = any(member.request is request and member.alive for step in self.steps for member in step.members)
        return request.running and not request.loading and not (in_flight and self.lookahead and self.has_states)

    def room(self, name: str) -> int:
        request = self.requests[name]
        in_flight = sum(m.num_tokens for step in self.steps for m in step.members if m.request is request and m.alive)
        return self.max_model_len - request.committed - in_flight

    def reserve(
        self,
        names: Sequence[str],
        num_tokens: Sequence[int],
        *,
        num_drafts: Sequence[int] | None = None,
        from_activations: bool = False,
        fractions: Sequence[float] | None = None,
        at_once: bool = False,
    ) -> bool:
        """One step; False when it did not fit. `fractions` say how much of each row's step will be accepted."""
        assert self.skips or not from_activations
        drafts = [0] * len(names) if num_drafts is None else num_drafts
        growth = [self._growth(*row, from_activations) for row in zip(names, num_tokens, drafts, strict=True)]
        needs = [sum(len(grown.blocks[g]) for grown in growth) * fmt.tables for g, fmt in enumerate(self.formats)]
        short = self.pages_short(needs)
        rows = np.array([self.requests[name].row for name in names], dtype=np.int64)
        before = fingerprint(self.manager) if short > 0 else None
        refusal = plan = None
        try:
            plan = self.manager.reserve(
                rows, np.array(num_tokens), num_drafts=np.array(drafts), kv_from_activations=from_activations
            )
        except Exhausted as error:
            refusal = error
        if plan is None:
            assert refusal is not None
            assert short > 0, f"reserve refused what fits: {refusal}"
            assert refusal.pages_short == short
            self._check_exhausted(refusal, needs)
            assert fingerprint(self.manager) == before, "a refused reserve changed something"
            self.exhausted += 1
            return False
        assert short <= 0, f"reserve accepted {needs} blocks, {short} pages more than there are"
        assert plan.start.tolist() == [grown.start for grown in growth]
        self._take(names, growth)
        copies = self._check_copies(names, plan.copies)
        # The device copies the changed rows, and nothing else.
        for number, fmt in enumerate(self.formats):
            for row in plan.changed[fmt.group.name].tolist():
                self.device[number, row] = self.read_row(number, row, with_gaps=True)
        members = []
        for i, name in enumerate(names):
            request = self.requests[name]
            tables = {}
            for number in range(len(self.formats)):
                on_device = self.device.get((number, request.row), {})
                assert on_device == self.read_row(number, request.row, with_gaps=True), "a changed row was not named"
                tables[number] = {place: entry for place, entry in on_device.items() if entry >= 0}
            fraction = fractions[i] if fractions is not None else 1.0
            start, has_gap = growth[i].start, growth[i].has_gap
            members.append(Member(request, request.life, num_tokens[i], drafts[i], start, has_gap, fraction, tables))
        self._check_slots(plan, members)
        self.steps.append(Step(plan.step, members, copies, from_activations))
        self.compare(may_evict=self.manager.pool.free_pages == 0)
        if at_once:
            self.run_until(self.steps[-1])
        return True

    def _growth(self, name: str, count: int, drafts: int, from_activations: bool) -> Growth:
        request = self.requests[name]
        start = self.max_model_len - self.room(name)
        after = start + count
        # Drafts may be rejected, so only the others make tokens unreachable for sure.
        sure = after - drafts
        sure -= sum(m.num_drafts for step in self.steps for m in step.members if m.request is request and m.alive)
        blocks: dict[int, list[int]] = {}
        ends = dict(request.ends)
        has_gap = False
        for group, fmt in enumerate(self.formats):
            if not fmt.block_size:
                blocks[group] = [] if ends[group] else list(range(1 + self.lookahead))
                ends[group] = 1 + self.lookahead
                continue
            stored = request.image_tokens if isinstance(fmt.group.spec, CrossAttention) else after + self.lookahead
            new = sorted({p // fmt.block_size for p in range(ends[group] * fmt.block_size, stored)})
            blocks[group] = [b for b in new if not (from_activations and self.is_dead(group, b, sure))]
            has_gap = has_gap or len(blocks[group]) < len(new)
            ends[group] = max([ends[group], *(b + 1 for b in new)])
        return Growth(start, blocks, ends, has_gap)

    def pages_short(self, needs: Sequence[int], shared: Sequence[tuple[int, Entry]] = ()) -> int:
        """Page arithmetic from scratch: which pages hold a referenced block, and whose they are."""
        used = self.references() + Counter(shared)
        owner: dict[int, int] = {}
        for group, entry in used:
            owner[self.page_of(entry)] = group
        wanted = 0
        for group, need in enumerate(needs):
            mine = sum(1 for g in owner.values() if g == group) * self.per_page[group]
            spare = mine - sum(1 for g, _ in used if g == group)
            beyond = need - spare
            while beyond > 0:
                wanted += 1
                beyond -= self.per_page[group]
        return wanted - (self.num_pages - len(owner))

    def _check_exhausted(self, error: Exhausted, needs: Sequence[int]) -> None:
        used = self.references()
        pages = {(g, self.page_of(entry)) for g, entry in used}
        shortfall = {}
        for group, fmt in enumerate(self.formats):
            spare = sum(fmt.blocks_per_page for g, _ in pages if g == group) - sum(1 for g, _ in used if g == group)
            if needs[group] > spare:
                shortfall[fmt.group.name] = needs[group] - spare
        assert error.shortfall == shortfall
        for request in self.requests.values():
            if request.running:
                assert error.would_free[request.row] == {
                    fmt.group.name: sum(used[group, entry] == 1 for entry in request.held[group].values())
                    for group, fmt in enumerate(self.formats)
                }
        assert len(error.would_free) == sum(request.running for request in self.requests.values())

    def _take(self, names: Sequence[str], growth: Sequence[Growth]) -> None:
        """Read the entries that the rows got, and poison them."""
        used = self.references()
        for name, grown in zip(names, growth, strict=True):
            request = self.requests[name]
            request.ends = grown.ends
            for group, fmt in enumerate(self.formats):
                actual = self.read_row(group, request.row)
                for block in grown.blocks[group]:
                    for table in range(fmt.tables):
                        assert (table, block) in actual, f"{name} has no block {block} of {fmt.group.name}"
                        entry = actual[table, block]
                        assert (group, entry) not in used, "a block in use was handed out"
                        used[group, entry] += 1
                        request.held[group][table, block] = entry
                        self.poison(group, entry, table)

    def _check_copies(self, names: Sequence[str], copies: Sequence[Any]) -> list[tuple[int, list[Entry], list[Entry]]]:
        numbers = {fmt.group.name: group for group, fmt in enumerate(self.formats)}
        got = [(numbers[copy.group], copy.source.tolist(), copy.destination.tolist()) for copy in copies]
        expected = []
        for name in names:
            request = self.requests[name]
            if request.sources and not request.restored:
                request.restored = True
                for group, entries in request.sources.items():
                    running = [request.held[group][table, 0] for table in range(self.formats[group].tables)]
                    expected.append((group, entries, running))
        assert sorted(got) == sorted(expected), "copies of restored states"
        return got

    def _check_slots(self, plan: Any, members: Sequence[Member]) -> None:
        for group, fmt in self._attention():
            expected = [
                [self.slot(m, group, table, m.start + i) for m in members for i in range(m.num_tokens)]
                for table in range(fmt.tables)
            ]
            assert self.manager.slots(plan, fmt.group.name).tolist() == expected, f"slots of {fmt.group.name}"

    def slot(self, member: Member, group: int, table: int, position: int) -> int:
        block, offset = divmod(position, self.formats[group].block_size)
        entry = member.tables[group].get((table, block))
        return -1 if entry is None else entry * self.formats[group].block_size + offset

    def commit(self, sampled: Sequence[int] = ()) -> None:
        """Commit the oldest step. `sampled` are tokens to use, cyclically, where a row goes beyond what it has."""
        step = self.steps[0]
        self.run_until(step, sampled)
        alive = [member for member in step.members if member.alive]
        ids: list[int] = []
        for member in alive:
            request, after = member.request, member.request.committed + member.accepted
            if self.caching:
                ids += request.tokens[max(request.known, request.committed) : max(after, request.known)]
        self.manager.commit(
            np.array([m.request.row for m in alive], dtype=np.int64),
            np.array([m.accepted for m in alive], dtype=np.int64),
            np.array(ids, dtype=np.int64) if ids else None,
        )
        self.steps.pop(0)
        for member in alive:
            request = member.request
            request.committed += member.accepted
            if self.caching:
                request.known = max(request.known, request.committed)
                self._register(request)
            self.drafted += member.num_drafts
            self.accepted_drafts += max(member.accepted - (member.num_tokens - member.num_drafts), 0)
            request.sources = {}
            self._slide(request, member.accepted)
        while self.limbo and self.limbo[0][0] <= step.number:
            self.limbo.pop(0)
        counts = self.manager.drafts.counts()
        assert (counts.num_draft_tokens, counts.num_accepted_tokens) == (self.drafted, self.accepted_drafts)
        self.compare()

    def _register(self, request: Request) -> None:
        """Blocks that end in base blocks which have become whole."""
        whole = request.committed // self.base
        for group, fmt in self._attention():
            for (table, block), entry in request.held[group].items():
                end = (block + 1) * fmt.block_size
                if request.registered * self.base < end <= whole * self.base:
                    request.waiting[self.key(request, group, table, end)] = entry
        request.registered = max(request.registered, whole)

    def _settle(self, request: Request) -> None:
        """A row lets go of its blocks, and before that puts them under their keys."""
        for key, entry in request.waiting.items():
            self.put.setdefault(key, set()).add(entry)
        request.waiting = {}

    def _put(self) -> dict[CacheKey, set[Entry]]:
        """Blocks that have been put under keys since the last comparison, as far as the keys had none."""
        put, self.put = self.put, {}
        for request in self.requests.values():
            done = int(self.manager._sequences.registered[request.row]) * self.base
            for key in [key for key in request.waiting if key[2] <= done]:
                put.setdefault(key, set()).add(request.waiting.pop(key))
        return {key: entries for key, entries in put.items() if key not in self.cached}

    def catch_up(self) -> None:
        """The engine has nothing better to do."""
        self.manager.catch_up()
        self.compare()
        assert not any(request.waiting for request in self.requests.values())

    def _slide(self, request: Request, accepted: int) -> None:
        for group, _ in self._attention():
            held = request.held[group]
            request.held[group] = {
                (table, block): entry
                for (table, block), entry in held.items()
                if not self.is_dead(group, block, request.committed)
            }
        for group, fmt in self._states():
            if self.lookahead and 1 < accepted <= 1 + self.lookahead:
                held = request.held[group]
                for table in range(fmt.tables):
                    held[table, 0], held[table, accepted - 1] = held[table, accepted - 1], held[table, 0]

    def can_checkpoint(self, name: str) -> bool:
        request = self.requests[name]
        in_flight = any(m.request is request and m.alive for step in self.steps for m in step.members)
        is_whole = request.committed > 0 and request.committed % self.base == 0
        return request.running and not request.loading and not in_flight and is_whole

    def checkpoint(self, name: str) -> None:
        request = self.requests[name]
        needs = [0 if fmt.block_size else fmt.tables for fmt in self.formats]
        is_new = self.caching and not all(
            self.key(request, group, table, request.committed) in self.cached
            for group, fmt in self._states()
            for table in range(fmt.tables)
        )
        has_run = all(request.ends[group] for group, _ in self._states())
        expected = is_new and has_run and self.pages_short(needs) <= 0
        free_pages = self.manager.pool.free_pages
        copies = self.manager.checkpoint(request.row)
        assert bool(copies) == expected
        if not expected:
            self.compare()
            return
        numbers = {fmt.group.name: group for group, fmt in enumerate(self.formats)}
        candidates: dict[CacheKey, set[Entry]] = {}
        destinations: set[tuple[int, Entry]] = set()
        used = self.references()
        for copy in copies:
            group = numbers[copy.group]
            running = [request.held[group][table, 0] for table in range(self.formats[group].tables)]
            assert copy.source.tolist() == running, "a checkpoint of something else than the running state"
            for table, entry in enumerate(copy.destination.tolist()):
                assert (group, entry) not in used, "a checkpoint overwrites a block in use"
                assert (group, entry) not in destinations, "two checkpoints in one block"
                destinations.add((group, entry))
                candidates[self.key(request, group, table, request.committed)] = {entry}
        for copy in copies:
            group = numbers[copy.group]
            for table, (source, destination) in enumerate(zip(copy.source, copy.destination, strict=True)):
                self.poison(group, int(destination), table)
                self.copy_block(group, int(source), int(destination))
        self.compare(candidates, may_evict=free_pages < sum(needs))
        for group, fmt in self._states():
            for table in range(fmt.tables):
                assert self.key(request, group, table, request.committed) in self.cached, "a checkpoint is missing"

    # -- loads --------------------------------------------------------------------------------------------------------

    def load_lengths(self, name: str) -> list[int]:
        """Lengths that a load of the request may end at: where a block of every group ends."""
        request = self.requests[name]
        if not self.caching or not request.running or request.loading or not self.at_rest(name):
            return []
        limit = request.known if request.known > len(request.prompt) else request.known - 1
        sizes = [self.base, *(fmt.block_size for _, fmt in self._attention())]
        return [n for n in range(request.committed + 1, limit + 1) if all(n % size == 0 for size in sizes)]

    def start_load(self, name: str, length: int) -> bool:
        """Take blocks up to a length; False when they did not fit."""
        self.catch_up()  # a load shares whatever there is
        request = self.requests[name]
        wanted: dict[int, list[int]] = {group: self.live_blocks(group, length) for group, _ in self._attention()}
        held: dict[int, dict[Place, Entry]] = {}
        states: dict[int, list[Entry]] = {}
        shared: list[tuple[int, Entry]] = []
        needs = [0] * len(self.formats)
        for group, fmt in self._attention():
            held[group] = {
                (table, block): entry
                for (table, block), entry in request.held[group].items()
                if block in wanted[group] and (block + 1) * fmt.block_size <= request.committed
            }
            for block in wanted[group]:
                keys = [self.key(request, group, t, (block + 1) * fmt.block_size) for t in range(fmt.tables)]
                if (0, block) in held[group]:
                    continue
                if all(key in self.cached for key in keys):
                    held[group] |= {(t, block): self.cached[key] for t, key in enumerate(keys)}
                    shared += [(group, self.cached[key]) for key in keys]
                else:
                    needs[group] += fmt.tables
        for group, fmt in self._states():
            keys = [self.key(request, group, table, length) for table in range(fmt.tables)]
            if all(key in self.cached for key in keys):
                states[group] = [self.cached[key] for key in keys]
                shared += [(group, entry) for entry in states[group]]
            else:
                needs[group] += fmt.tables
        short = self.pages_short(needs, shared)
        self.manager.keys(request.row, 0, length // self.base)  # a key that is hashed stays hashed
        before = fingerprint(self.manager) if short > 0 else None
        free_pages = self.manager.pool.free_pages
        refusal = runs = None
        try:
            runs = self.manager.reserve_load(request.row, length)
        except Exhausted as error:
            refusal = error
        if runs is None:
            assert refusal is not None
            assert short > 0, f"reserve_load refused what fits: {refusal}"
            assert refusal.pages_short == short
            assert fingerprint(self.manager) == before, "a refused load changed something"
            self.exhausted += 1
            self.compare()
            return False
        assert short <= 0, f"reserve_load accepted {needs} blocks, {short} pages more than there are"
        used = self.references() + Counter(shared)
        numbers = {fmt.group.name: group for group, fmt in enumerate(self.formats)}
        missing: dict[tuple[int, int, int], Entry] = {}
        for run in runs:
            group = numbers[run.group]
            for table, entries in enumerate(run.entries.tolist()):
                for block, entry in zip(run.logical.tolist(), entries, strict=True):
                    assert (group, entry) not in used, "a block in use was handed out"
                    used[group, entry] += 1
                    missing[group, table, block] = entry
                    self.poison(group, entry, table)
                    if self.formats[group].block_size:
                        held[group][table, block] = entry
                    else:
                        states.setdefault(group, []).append(entry)
        for group, fmt in self._attention():
            request.held[group], request.ends[group] = held[group], length // fmt.block_size
        request.loading = Loading(length, missing, states)
        # Blocks that the row no longer needs come free after the others are taken.
        pages = sum(-(-need // per_page) for need, per_page in zip(needs, self.per_page, strict=True))
        self.compare(may_evict=free_pages < pages)
        return True

    def end_load(self, name: str, fails: Sequence[bool]) -> None:
        """The blocks arrive, those excepted for which `fails`, repeated, says so."""
        request = self.requests[name]
        assert request.loading is not None
        loading, failed = request.loading, dict[str, list[int]]()
        lost: set[Entry] = set()
        blocks = sorted({(group, block) for group, _, block in loading.missing})
        for number, (group, block) in enumerate(blocks):
            fmt = self.formats[group]
            for table in range(fmt.tables):
                entry = loading.missing[group, table, block]
                if fails[number % len(fails)]:
                    lost.add(entry)
                    failed.setdefault(fmt.group.name, []).append(block)
                    continue
                first = block * fmt.block_size if fmt.block_size else loading.length - 1
                for offset in range(fmt.block_size or 1):
                    self.write(group, entry, offset, request.chain[first + offset])
        candidates: dict[CacheKey, Entry] = {}
        for group, fmt in self._attention():
            for (table, block), entry in request.held[group].items():
                end = (block + 1) * fmt.block_size
                # The load may also complete a base block that began with blocks of the row's own.
                if request.registered * self.base < end and entry not in lost:
                    candidates[self.key(request, group, table, end)] = entry
        for group, entries in loading.states.items():
            # A checkpoint of several tables is kept as a whole.
            for table, entry in enumerate(entries if not lost & set(entries) else ()):
                candidates[self.key(request, group, table, loading.length)] = entry
        admission = self.manager.settle_load(request.row, failed)
        candidates = {key: entry for key, entry in candidates.items() if key not in self.cached}
        self.cached |= candidates
        self.places |= {(key[0], entry): key for key, entry in candidates.items()}
        request.loading = None
        if failed:
            self._start(request, self.expected_hit(request), admission.num_cached_tokens, admission.limited_by)
            return
        assert admission.num_cached_tokens == loading.length
        request.committed = request.computed = loading.length
        request.registered = loading.length // self.base
        request.sources, request.restored = loading.states, False
        self.compare()

    def at_rest(self, name: str) -> bool:
        return not any(m.request is self.requests[name] and m.alive for step in self.steps for m in step.members)

    def look_again(self, name: str) -> None:
        """Begin again, with what is cached by now; a load under way is given up."""
        request = self.requests[name]
        call = self.manager.cancel_load if request.loading else self.manager.look_again
        request.loading = None
        admission = call(request.row)
        self._start(request, self.expected_hit(request), admission.num_cached_tokens, admission.limited_by)

    # -- the device ---------------------------------------------------------------------------------------------------

    def run_until(self, last: Step, sampled: Sequence[int] = ()) -> None:
        for step in self.steps:
            if not step.has_run:
                self._run(step, sampled or (0, 1, 1))
                step.has_run = True
            if step is last:
                return

    def _run(self, step: Step, sampled: Sequence[int]) -> None:
        for group, sources, destinations in step.copies:
            for source, destination in zip(sources, destinations, strict=True):
                self.copy_block(group, source, destination)
        for member in step.members:
            if member.alive:
                self._run_row(member, step.from_activations, sampled)
            else:
                self._run_dead(member)

    def accepted_of(self, member: Member) -> int:
        """How many tokens stand: any number, where nothing was lost that a rejection would need."""
        count, least = member.num_tokens, 0
        if self.skips:
            least = count - member.num_drafts
        if self.has_states:
            least = max(least, 1) if count <= 1 + self.lookahead else count
        return max(least, min(count, int(member.fraction * (count + 1))))

    def _run_row(self, member: Member, from_activations: bool, sampled: Sequence[int]) -> None:
        request, start, count = member.request, member.request.computed, member.num_tokens
        accepted = member.accepted = self.accepted_of(member)
        for i in range(len(request.tokens), start + accepted):
            self.extend(request, [sampled[i % len(sampled)]])
        for group, fmt in self._attention():
            for k in range(start):
                if not sees(fmt.group.spec, start, k):
                    continue
                for table in range(fmt.tables):
                    entry = member.tables[group].get((table, k // fmt.block_size))
                    assert entry is not None, f"{fmt.group.name} of {request.name}: token {k} is needed and not held"
                    found = self.read(group, entry)[k % fmt.block_size]
                    assert found == request.chain[k], f"{fmt.group.name} of {request.name}: wrong token {k}"
            for i in range(count):
                for table in range(fmt.tables):
                    entry = member.tables[group].get((table, (start + i) // fmt.block_size))
                    if entry is None:
                        assert from_activations, f"{fmt.group.name} of {request.name}: no slot for token {start + i}"
                        continue
                    value = request.chain[start + i] if i < accepted else self._garbage()
                    self.write(group, entry, (start + i) % fmt.block_size, value)
        for group, fmt in self._states():
            for table in range(fmt.tables):
                if start:
                    found = self.read(group, member.tables[group][table, 0])[0]
                    assert found == request.chain[start - 1], f"{fmt.group.name} of {request.name}: wrong state"
                if count > 1 + self.lookahead:
                    self.write(group, member.tables[group][table, 0], 0, request.chain[start + count - 1])
                    continue
                for i in range(count):
                    value = request.chain[start + i] if i < accepted else self._garbage()
                    self.write(group, member.tables[group][table, i], 0, value)
        request.computed += accepted

    def _run_dead(self, member: Member) -> None:
        """A row that left while its step was in flight still writes, into blocks that must not be anybody else's."""
        used = self.references()
        taken = {(g, entry) for r in self.requests.values() for g, held in r.held.items() for entry in held.values()}
        for group, fmt in enumerate(self.formats):
            if isinstance(fmt.group.spec, CrossAttention):
                continue
            positions = range(member.start, member.start + member.num_tokens) if fmt.block_size else range(1)
            for position in positions:
                for table in range(fmt.tables):
                    block, offset = divmod(position, fmt.block_size or 1)
                    entry = member.tables[group].get((table, block))
                    if entry is not None:
                        assert (group, entry) in used, "a block of a step in flight is free"
                        assert (group, entry) not in taken, "a block of a step in flight was given to another request"
                        self.write(group, entry, offset, self._garbage())

    def _garbage(self) -> int:
        self.garbage -= 1
        return self.garbage - 100

    def page_of(self, entry: Entry) -> int:
        return entry * self.unit // self.page_bytes

    def id_of(self, group: int, entry: Entry) -> int:
        page, rest = divmod(entry * self.unit, self.page_bytes)
        slot, inside = divmod(rest, self.block_bytes[group])
        assert inside == 0, "an entry that is not a block"
        assert 0 <= page < self.num_pages, "an entry outside the arena"
        assert slot < self.per_page[group], "an entry in the tail of a page"
        return page * self.stride + slot

    def entry_of(self, group: int, block: int) -> Entry:
        page, slot = divmod(block, self.stride)
        return (page * self.page_bytes + slot * self.block_bytes[group]) // self.unit

    def copy_block(self, group: int, source: Entry, destination: Entry) -> None:
        self.pages[self.page_of(destination)][1][destination] = list(self.read(group, source))

    def poison(self, group: int, entry: Entry, table: int) -> None:
        """A block has been taken, or freed: whatever was in it is gone."""
        self.table_of[group, entry] = table
        page = self.page_of(entry)
        if page not in self.pages or self.pages[page][0] != group:
            self.pages[page] = (group, {})
        self.pages[page][1][entry] = [POISON] * (self.formats[group].block_size or 1)

    def read(self, group: int, entry: Entry) -> list[int]:
        owner, blocks = self.pages.get(self.page_of(entry), (POISON, {}))
        return blocks[entry] if owner == group and entry in blocks else [POISON] * (self.formats[group].block_size or 1)

    def write(self, group: int, entry: Entry, offset: int, value: int) -> None:
        assert (group, entry) not in self.places, "a block with a key is written"
        owner, blocks = self.pages[self.page_of(entry)]
        assert owner == group, "a write into another group's page"
        blocks[entry][offset] = value

    def read_row(self, group: int, row: int, *, with_gaps: bool = False) -> dict[Place, Entry]:
        """A row of a table as a kernel would read it: from `entries`, `first` and `end` alone."""
        table = self.manager.tables[self.formats[group].group.name]
        first, end, sinks = int(table.first[row]), int(table.end[row]), table.sink_blocks
        row_of_table = {}
        for number in range(self.formats[group].tables):
            entries = table.entries[number, row].tolist()
            for block in [*range(min(sinks, end)), *range(first, end)]:
                entry = entries[block if block < sinks else sinks + block - first]
                if entry >= 0 or with_gaps:
                    row_of_table[number, block] = entry
        return row_of_table

    # -- comparison ---------------------------------------------------------------------------------------------------

    def references(self) -> Counter[tuple[int, Entry]]:
        used: Counter[tuple[int, Entry]] = Counter()
        for request in self.requests.values():
            for group, places in request.held.items():
                used.update((group, entry) for entry in places.values())
            for group, entries in request.sources.items():
                used.update((group, entry) for entry in entries)
            for group, entries in request.loading.states.items() if request.loading else ():
                used.update((group, entry) for entry in entries)
        for _, blocks in self.limbo:
            used.update(blocks)
        return used

    def compare(self, candidates: Mapping[CacheKey, set[Entry]] | None = None, *, may_evict: bool = False) -> None:
        """All of the manager's state that an engine can see against the oracle's."""
        self.operations += 1
        self.manager.check()
        rows = {request.row: request for request in self.requests.values()}
        assert len(rows) == len(self.requests), "two requests in one row"
        for request in self.requests.values():
            assert self.manager.committed[request.row] == request.committed
            for group, fmt in enumerate(self.formats):
                actual = self.read_row(group, request.row)
                assert actual == request.held.get(group, {}), f"table of {fmt.group.name}, {request.name}"
        used = self.references()
        owner: dict[int, int] = {}
        for group, entry in used:
            assert owner.setdefault(self.page_of(entry), group) == group, "a page of two groups"
        ids = {self.id_of(group, entry): count for (group, entry), count in used.items()}
        refs = self.manager.pool.refs
        assert ids == {block: int(refs[block]) for block in np.flatnonzero(refs).tolist()}, "reference counts"
        for group in range(len(self.formats)):
            counts = self.manager.pool.counts(group)
            assert counts.referenced == sum(1 for g, _ in used if g == group)
        self._compare_cache((candidates or {}) | self._put(), may_evict)

    def _is_prefix(self, prefix: int, of: int) -> bool:
        while self.prefixes.depth[of] > self.prefixes.depth[prefix]:
            of = self.prefixes.parent[of]
        return of == prefix

    def _compare_cache(self, candidates: Mapping[CacheKey, set[Entry]], may_have_evicted: bool = False) -> None:
        owner = self.manager.pool.owner
        actual: dict[CacheKey, Entry] = {}
        fresh = {(key[0], entry): key for key, entries in candidates.items() for entry in entries}
        for block in np.flatnonzero(self.manager.pool.cached).tolist():
            group = int(owner[block // self.stride])
            entry = self.entry_of(group, block)
            content = self.read(group, entry)
            # A block of a key keeps it, unless it was evicted and taken again: then it is a candidate.
            key = fresh[group, entry] if (group, entry) in fresh else self.places.get((group, entry))
            assert key is not None, "a block was cached that nothing announced"
            assert key not in actual, "two cached blocks of one key"
            last = len(content) - 1
            assert content[last] >= 0, "a cached block holds garbage"
            assert self.prefixes.depth[content[last]] == key[2], "a cached block is at another place"
            assert self._is_prefix(content[last], key[3]), "a cached block holds another sequence"
            for earlier, later in pairwise(content):
                assert self.prefixes.parent[later] == earlier, "a cached block holds mixed content"
            actual[key] = entry
        gone = {key for key in self.cached if actual.get(key) != self.cached[key]}
        missing = {key for key in candidates if key not in actual}
        assert may_have_evicted or not gone, "a cached block was lost without need"
        assert may_have_evicted or not missing, "a whole block was not cached"
        self.cached = actual
        self.places = {(key[0], entry): key for key, entry in actual.items()}


def _is_bounded(spec: LayerSpec) -> bool:
    return isinstance(spec, SlidingWindow | SinkWindow | ChunkedLocal | SlidingWindowMLA)


def geometry_of(
    layout: Any, block_sizes: Mapping[str, int], tables: Mapping[str, int], page_factor: int = 1, page_tail: int = 0
) -> PageGeometry:
    """A geometry by hand: `page_factor` of the largest block to a page, and `page_tail` bytes that no block fills."""
    cuts = []
    for group in layout.groups:
        size = 0 if isinstance(group.spec, RecurrentState) else block_sizes[group.name]
        layer_bytes = group.spec.state_bytes or group.spec.bytes_per_token * size
        cuts.append((group, size, tables[group.name], layer_bytes))
    largest = max(len(group.layers) // number * layer_bytes for group, _, number, layer_bytes in cuts)
    page = largest * page_factor + page_tail
    return PageGeometry("by hand", layout, page, tuple(BlockFormat(*cut, page_bytes=page) for cut in cuts))


def fingerprint(value: Any, _seen: frozenset[int] = frozenset()) -> Any:
    """Everything reachable from a manager as one comparable value; hash objects by their digest."""
    if isinstance(value, str | bytes | int | float | bool | type(None)):
        return value
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype.str, value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, FunctionType | MethodType) or id(value) in _seen:
        return type(value).__name__
    seen = _seen | {id(value)}
    if isinstance(value, Mapping):
        return tuple((fingerprint(k, seen), fingerprint(v, seen)) for k, v in value.items())
    if isinstance(value, tuple | list) or type(value).__name__ == "deque":
        return tuple(fingerprint(item, seen) for item in value)
    if isinstance(value, set | frozenset):
        return tuple(sorted(repr(fingerprint(item, seen)) for item in value))
    if hasattr(value, "hexdigest"):
        return value.hexdigest()
    names = list(getattr(value, "__dict__", {})) + [
        name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())
    ]
    return (type(value).__name__, *((name, fingerprint(getattr(value, name), seen)) for name in names))
