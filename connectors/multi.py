"""MultiConnector: a stack of tiers, the nearest first, as one store. Tiers are any stores, each with its own settings.

    get   walks down; what a lower tier has is copied into the nearest one (`promote`); after a fault the next is asked
    put   by `write_policy`, which also says what STORED promises:
          write_through    every tier that works and admits the value has it, the lowest first
          write_back       the nearest tier has it, and holds it until a tier below has it, which is soon
          write_on_evict   the same, but it is written down only when the nearest tier gets full (`high_watermark`),
                           the least useful first, down to `low_watermark`; what is deleted before is never written
          Until then a value is as durable as the nearest tier. `flush` and `close` wait until all is written down.

A tier that takes nothing more is given room once (what it holds for the tiers below is written down), and then the next
tier is asked; one that fails is left alone for a while (`stack.tiers`), and the others go on. No lock is held during a
tier's I/O. `quota_bytes` bounds what each owner keeps (`put_for`), by giving up the owner's own oldest values.

The stats are the sums over the tiers; only `outcomes` are this store's own, and its own faults are added.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from kvtide.kvcache import ConfigError
from kvtide.offload.admission import TinyLFU
from kvtide.offload.eviction import POLICIES, make_policy
from kvtide.offload.keys import StoreKey
from kvtide.offload.quota import Quotas
from kvtide.offload.store import Entry, Lease, Status, Store, StoreStats
from kvtide.offload.values import HEADER_BYTES, Header

from .base import BaseConnector
from .config import store_settings
from .settings import StoreConfig, size_of
from .stack.tiers import Tier, TierConfig
from .stack.writeback import THERE, Marks, Pending, Writer, delete_from, put_with_room

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_PROMOTED_KEYS = 1 << 18  # whose uses are counted for `second_use`
_PENDING_SHARE = 0.5  # of the nearest tier, that write-back may hold before callers help
_UNBOUNDED = 1 << 30  # and what it may hold where the tier is not bounded


class MultiConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a `MultiConnector`."""

    sizes = ("default_quota_bytes",)

    connectors: Annotated[list[TierConfig], Meta(description="The tiers, the nearest first.", min_length=1)]
    write_policy: Annotated[
        Literal["write_through", "write_back", "write_on_evict"],
        Meta(description="When a stored value reaches the tiers below the first."),
    ] = "write_through"
    promote: Annotated[
        Literal["always", "second_use", "never"],
        Meta(description="Whether what a lower tier has is copied into the first when it is read."),
    ] = "always"
    eviction: Annotated[
        str, Meta(description=f"With write_on_evict, what is written down first: by {', '.join(POLICIES)}.")
    ] = "lru"
    high_watermark: Annotated[
        float,
        Meta(description="With write_on_evict, the full part of a tier from which on it writes down.", gt=0, le=1),
    ] = 0.8
    low_watermark: Annotated[
        float, Meta(description="With write_on_evict, the full part of a tier down to which it writes.", ge=0, le=1)
    ] = 0.6
    quota_bytes: Annotated[
        dict[str, int | str], Meta(description="Bound by owner (salt) on what is kept for it, such as {tenant: 10GiB}.")
    ] = msgspec.field(default_factory=dict)
    default_quota_bytes: Annotated[
        int | str | None, Meta(description="The bound of owners that quota_bytes does not name; none by default.")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.quotas()
        if self.low_watermark > self.high_watermark:
            raise ConfigError(
                f"low_watermark {self.low_watermark} must not be above high_watermark {self.high_watermark}"
            )
        for at, tier in enumerate(self.connectors):
            try:
                store_settings(tier.kv_connector, tier.kv_connector_extra_config, tier.kv_connector_module_path)
            except ConfigError as error:
                raise ConfigError(f"connectors[{at}]: {error}") from None

    def quotas(self) -> dict[str, int]:
        """Bytes by owner."""
        return {owner: size_of(f"quota_bytes: {owner}", size) for owner, size in self.quota_bytes.items()}


class _Leases(Lease):
    def __init__(self, statuses: Sequence[Status], leases: Sequence[Lease]) -> None:
        super().__init__(statuses)
        self._leases = leases

    def close(self) -> None:
        for lease in self._leases:
            lease.close()


class MultiConnector(BaseConnector):
    """Several stores as one."""

    Config = MultiConfig
    name = "multi"

    def __init__(self, config: MultiConfig) -> None:
        super().__init__()
        self._quotas = Quotas(config.quotas(), config.num_bytes("default_quota_bytes") or None)
        self._promote = config.promote
        self._uses = TinyLFU(_PROMOTED_KEYS) if config.promote == "second_use" else None
        self._write_through = config.write_policy == "write_through"
        self._tiers: list[Tier] = []
        try:
            for number, tier_config in enumerate(config.connectors):
                try:
                    self._tiers.append(Tier(tier_config, self._fault))
                except ConfigError as error:
                    raise ConfigError(f"connectors[{number}]: {error}") from None
            self._pending = self._make_pending(config)
        except BaseException:
            for tier in self._tiers:
                tier.store.close()
            raise
        self._copies = _Copies()
        self._writer = Writer(self._tiers, [pending for pending in self._pending if pending is not None])

    @property
    def tiers(self) -> Sequence[Store]:
        return [tier.store for tier in self._tiers]

    def put_for(self, owner: str, keys: Sequence[StoreKey], buffers: Sequence[ReadableBuffer]) -> list[Status]:
        allowed, refused, given_up = list[int](), list[int](), list[StoreKey]()
        for at, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            victims = self._quotas.charge(owner, key, HEADER_BYTES + memoryview(buffer).nbytes)
            (refused if victims is None else allowed).append(at)
            given_up += victims or ()
        if given_up:
            self._delete(given_up)
        statuses = [Status.REFUSED] * len(keys)
        for at, status in zip(
            allowed, self.put([keys[at] for at in allowed], [buffers[at] for at in allowed]), strict=True
        ):
            statuses[at] = status
        self._answer("put", [keys[at] for at in refused], lambda: [Status.REFUSED] * len(refused))
        self._quotas.release([key for key, status in zip(keys, statuses, strict=True) if status not in THERE])
        return statuses

    def flush(self) -> bool:
        """Write everything that is pending down to the lowest tier; whether nothing is left."""
        for pending in self._pending:
            if pending is not None:
                pending.write_down(pending.num_bytes)
        return not any(pending.num_bytes for pending in self._pending if pending is not None)

    def lease(self, keys: Sequence[StoreKey]) -> Lease:
        leases: list[Lease] = []

        def look_up() -> list[Status]:
            statuses = [Status.MISS] * len(keys)
            left = list(range(len(keys)))
            for tier in self._loading:
                lease = tier.lease([keys[at] for at in left])
                leases.append(lease)
                left = _settle(statuses, left, lease.statuses)
            return statuses

        return _Leases(self._answer("contains", keys, look_up), leases)

    def touch(self, keys: Sequence[StoreKey]) -> None:
        self._used(-1, keys)

    def touch_prefix(self, keys: Sequence[StoreKey]) -> None:
        self._quotas.order(keys)
        for pending in self._pending:
            if pending is not None:
                pending.order(keys)
        self._tiers[0].touch_prefix(keys)
        self._writer.touch_prefix(self._tiers[1:], list(keys))

    def cool(self, keys: Sequence[StoreKey]) -> None:
        for tier in self._tiers:
            tier.store.cool(keys)

    def verify(self, keys: Sequence[StoreKey]) -> list[Status]:
        """Read and check the values of every tier: CORRUPT if any is, HIT if one is there and none is corrupt."""
        found = [tier.store.verify(keys) for tier in self._tiers]
        order = (Status.CORRUPT, Status.HIT, Status.ERROR, Status.MISS)
        return [min(statuses, key=order.index) for statuses in zip(*found, strict=True)]

    def gc(self) -> int:
        for tier in self._tiers:
            tier.expire()
        return sum(tier.store.gc() for tier in self._tiers)

    def scan(self) -> Iterator[Entry]:
        """Every value once, from the nearest tier that has it."""
        seen: set[StoreKey] = set()
        for tier in self._tiers:
            for entry in tier.store.scan():
                if entry.key not in seen:
                    seen.add(entry.key)
                    yield entry

    def stats(self) -> StoreStats:
        stats = super().stats()
        found = [tier.store.stats() for tier in self._tiers]
        stats.num_values = sum(each.num_values for each in found)
        stats.num_bytes = sum(each.num_bytes for each in found)
        stats.evicted = sum(each.evicted for each in found)
        for each in found:
            stats.faults.update(each.faults)
        bounds = [each.capacity_bytes for each in found]
        stats.capacity_bytes = sum(bound for bound in bounds if bound is not None) if None not in bounds else None
        return stats

    @property
    def _loading(self) -> list[Tier]:
        return [tier for tier in self._tiers if tier.loads]

    def _contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        statuses = [Status.MISS] * len(keys)
        left = list(range(len(keys)))
        for tier in self._loading:
            left = _settle(statuses, left, tier.contains([keys[at] for at in left]))
        return statuses

    def _get(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        statuses = [Status.MISS] * len(keys)
        left = list(range(len(keys)))
        for depth, tier in enumerate(self._tiers):
            if not left or not tier.loads:
                continue
            asked, some_keys, some_views = left, [keys[at] for at in left], [views[at] for at in left]
            with self._copies.of(some_keys if depth else ()):
                left = _settle(statuses, asked, tier.get(some_keys, some_views))
                hits = [at for at in asked if statuses[at] is Status.HIT]
                if hits and depth:
                    self._copy_up([keys[at] for at in hits], [views[at] for at in hits])
            if hits:
                self._used(depth, [keys[at] for at in hits])
        if self._uses is not None:
            self._uses.record(keys)
        return statuses

    def _put(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        statuses = [Status.ERROR] * len(keys)
        left = list(range(len(keys)))
        stack = [(tier, pending) for tier, pending in zip(self._tiers, self._pending, strict=True) if tier.stores]
        # Written through, the lowest tier is first and has the say: what is seen above is already safe below.
        for tier, pending in reversed(stack) if self._write_through else stack:
            found = put_with_room(tier, pending, [keys[at] for at in left], [views[at] for at in left])
            for at, status in zip(left, found, strict=True):
                if statuses[at] not in THERE:
                    statuses[at] = min(statuses[at], status, key=_PUT_ORDER.index)
            if not self._write_through:
                left = [at for at in left if statuses[at] not in THERE]
        for pending in self._pending:
            if pending is not None:
                pending.write_down(pending.num_bytes - pending.marks.most)
        self._writer.look()
        return statuses

    def _delete(self, keys: Sequence[StoreKey]) -> list[Status]:
        self._copies.forbid(keys)
        self._quotas.release(keys)
        found = [
            delete_from(tier, pending, keys)
            for tier, pending in zip(self._tiers, self._pending, strict=True)
            if tier.stores
        ]
        order = (Status.ERROR, Status.DELETED, Status.MISS)
        return [min(statuses, key=order.index) for statuses in zip(*found, strict=True)] or [Status.ERROR] * len(keys)

    def _headers(self, keys: Sequence[StoreKey]) -> list[Header | None]:
        headers: list[Header | None] = [None] * len(keys)
        for tier in self._loading:
            left = [at for at, header in enumerate(headers) if header is None]
            for at, header in zip(left, tier.store.headers([keys[at] for at in left]), strict=True):
                headers[at] = header
        return headers

    def _shut(self) -> None:
        self._writer.close()
        if not self.flush():
            self._fault("not written down")
        for tier in self._tiers:
            tier.store.close()

    def _used(self, depth: int, keys: Sequence[StoreKey]) -> None:
        """Values of a tier were used: tell the ones below it, soon, and what keeps an order of uses here."""
        self._quotas.used(keys)
        for pending in self._pending:
            if pending is not None:
                pending.used(keys)
        self._writer.touch(self._tiers[depth + 1 :], list(keys))

    def _copy_up(self, keys: list[StoreKey], views: list[memoryview]) -> None:
        """Copy values that a lower tier had into the nearest."""
        top = self._tiers[0]
        if self._uses is not None:
            wanted = [at for at, key in enumerate(keys) if self._uses.frequency(key)]
            keys, views = [keys[at] for at in wanted], [views[at] for at in wanted]
        if self._promote == "never" or not top.stores or not keys:
            return
        top.put(keys, views)
        forbidden = self._copies.forbidden(keys)
        if forbidden:
            delete_from(top, self._pending[0], forbidden)

    def _make_pending(self, config: MultiConfig) -> list[Pending | None]:
        made: list[Pending | None] = [None] * len(self._tiers)
        if self._write_through:
            return made
        for depth in reversed(range(len(self._tiers) - 1)):
            tier = self._tiers[depth]
            if not tier.stores or not any(lower.stores for lower in self._tiers[depth + 1 :]):
                continue
            capacity = tier.store.stats().capacity_bytes
            if config.write_policy == "write_back":
                marks = Marks(0, 0, _UNBOUNDED if capacity is None else int(capacity * _PENDING_SHARE))
            elif capacity is not None:
                marks = Marks(int(capacity * config.low_watermark), int(capacity * config.high_watermark), capacity)
            else:
                raise ConfigError(
                    f"write_policy is write_on_evict, for which connectors[{depth}] ({tier.store.name}) must be bounded"
                )
            policy = make_policy(config.eviction)
            made[depth] = Pending(self._tiers[depth:], made[depth:], marks, policy, self._fault)
        return made


class _Copies:
    """Which values are being copied up, so that one that is deleted meanwhile does not come back. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Counter[StoreKey] = Counter()
        self._forbidden: set[StoreKey] = set()

    @contextmanager
    def of(self, keys: Sequence[StoreKey]) -> Iterator[None]:
        """Values are read below and copied up in this block."""
        with self._lock:
            self._running.update(keys)
        try:
            yield
        finally:
            with self._lock:
                for key in keys:
                    self._running[key] -= 1
                    if not self._running[key]:
                        del self._running[key]
                        self._forbidden.discard(key)

    def forbid(self, keys: Sequence[StoreKey]) -> None:
        """Values are about to be deleted."""
        with self._lock:
            self._forbidden.update(key for key in keys if key in self._running)

    def forbidden(self, keys: Sequence[StoreKey]) -> list[StoreKey]:
        """Those of the values that were deleted since they were read."""
        with self._lock:
            return [key for key in keys if key in self._forbidden]


_PUT_ORDER = (Status.STORED, Status.PRESENT, Status.FULL, Status.REFUSED, Status.ERROR)
_GET_ORDER = (Status.HIT, Status.CORRUPT, Status.ERROR, Status.MISS)


def _settle(statuses: list[Status], asked: list[int], found: Sequence[Status]) -> list[int]:
    """Note what a tier answered for the places that it was asked for; those that the next one is to be asked for."""
    for at, status in zip(asked, found, strict=True):
        statuses[at] = min(statuses[at], status, key=_GET_ORDER.index)
    return [at for at in asked if statuses[at] is not Status.HIT]
