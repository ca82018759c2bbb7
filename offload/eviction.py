"""Which values go first when a tier is full: LRU, S3-FIFO and ARC over keys with sizes in bytes.

A store tells its policy what happens (`on_insert`, `on_hit`, `on_remove`) and asks it for `victims`; the store's lock
guards it. Everything is O(1) amortised. A policy is not told a capacity: whoever asks for victims is full, so what it
holds *is* the capacity, and shares and ghosts (keys remembered after eviction, without values) are fractions of that.

    lru       one queue by last use
    s3fifo    small queue for newcomers (a tenth), main queue for what was used while it waited there; a value found at
              the end of main goes round again as often as it was used. A scan passes through the small queue only.
    arc       one queue for values used once, one for those used again; the ghosts of both move the border between them

Values that the engine expects little of (`on_cool`: the middle blocks of a window, which a prefix can only end at by
chance) go before all others, the longest cool first, until they are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import NamedTuple

from kvtide.kvcache import ConfigError

from .keys import StoreKey


class _Queue:
    """Keys in order with their sizes, the first to go at the front."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._sizes: OrderedDict[StoreKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: StoreKey) -> bool:
        return key in self._sizes

    def push(self, key: StoreKey, size: int) -> None:
        self._sizes[key] = size
        self.num_bytes += size

    def pop(self) -> tuple[StoreKey, int]:
        key, size = self._sizes.popitem(last=False)
        self.num_bytes -= size
        return key, size

    def drop(self, key: StoreKey) -> int | None:
        size = self._sizes.pop(key, None)
        self.num_bytes -= size or 0
        return size

    def to_back(self, key: StoreKey) -> None:
        self._sizes.move_to_end(key)

    def trim(self, num_bytes: int) -> None:
        while self.num_bytes > num_bytes and self._sizes:
            self.pop()


class _Next(NamedTuple):
    """A value that goes next, and where it is remembered if it does."""

    key: StoreKey
    size: int
    ghosts: _Queue | None = None


class EvictionPolicy(ABC):
    """The order in which values go. What it is told of keys that it does not know, it ignores."""

    def __init__(self) -> None:
        self._cool = _Queue()

    @property
    def num_bytes(self) -> int:
        """Bytes of the values that it knows."""
        return self._cool.num_bytes + sum(queue.num_bytes for queue in self._queues())

    def __len__(self) -> int:
        return len(self._cool) + sum(map(len, self._queues()))

    def __contains__(self, key: StoreKey) -> bool:
        return key in self._cool or any(key in queue for queue in self._queues())

    def on_insert(self, key: StoreKey, num_bytes: int) -> None:
        """A value was stored that was not there."""
        self._insert(key, num_bytes)

    def on_hit(self, key: StoreKey) -> None:
        """A value was used."""
        size = self._cool.drop(key)
        if size is None:
            self._hit(key)
        else:
            self._insert(key, size)

    def on_cool(self, key: StoreKey) -> None:
        """Little is expected of a value: it goes before those of which more is."""
        size = self._drop(key)
        if size is not None:
            self._cool.push(key, size)

    def on_prefix(self, keys: Sequence[StoreKey]) -> None:
        """Values have just served as one prefix, whose first block is the first key: they go from its end.

        No later block is of use without those before it. It counts as no further use of any of them.
        """
        for key in reversed(keys):
            for queue in self._queues():
                if key in queue:
                    queue.to_back(key)

    def on_remove(self, key: StoreKey) -> None:
        """A value is gone for another reason than `victims`; nothing of it is remembered."""
        if self._cool.drop(key) is None:
            self._drop(key)

    def victims(self, num_bytes: int, held: Container[StoreKey] = ()) -> list[StoreKey]:
        """Take out values of `num_bytes` together or a little more, in order; fewer where all the others are held.

        Held values that are come across are in use: they go on as if they had just been.
        """
        chosen: list[StoreKey] = []
        in_use: list[_Next] = []
        while num_bytes > 0:
            found = _Next(*self._cool.pop()) if len(self._cool) else self._next()
            if found is None:
                break
            if found.key in held:
                in_use.append(found)
                continue
            chosen.append(found.key)
            num_bytes -= found.size
            if found.ghosts is not None:
                found.ghosts.push(found.key, found.size)
                found.ghosts.trim(self.num_bytes)
        for found in in_use:
            self._readmit(found.key, found.size)
        return chosen

    @abstractmethod
    def _queues(self) -> tuple[_Queue, ...]:
        """Where values are, other than the cool ones."""

    @abstractmethod
    def _insert(self, key: StoreKey, size: int) -> None: ...

    @abstractmethod
    def _hit(self, key: StoreKey) -> None: ...

    @abstractmethod
    def _next(self) -> _Next | None:
        """Take out what goes next."""

    @abstractmethod
    def _readmit(self, key: StoreKey, size: int) -> None:
        """Put back what `_next` gave, as just used."""

    def _drop(self, key: StoreKey) -> int | None:
        for queue in self._queues():
            size = queue.drop(key)
            if size is not None:
                return size
        return None


class LRU(EvictionPolicy):
    """What was used least recently goes first."""

    def __init__(self) -> None:
        super().__init__()
        self._used = _Queue()

    def _queues(self) -> tuple[_Queue, ...]:
        return (self._used,)

    def _insert(self, key: StoreKey, size: int) -> None:
        self._used.push(key, size)

    def _hit(self, key: StoreKey) -> None:
        if key in self._used:
            self._used.to_back(key)

    def _next(self) -> _Next | None:
        return _Next(*self._used.pop()) if len(self._used) else None

    def _readmit(self, key: StoreKey, size: int) -> None:
        self._used.push(key, size)


class S3FIFO(EvictionPolicy):
    """Three FIFO queues (Yang et al., SOSP 2023): newcomers prove themselves in a small one; ghosts skip it."""

    _SMALL_SHARE = 0.1
    _MAX_USES = 3

    def __init__(self) -> None:
        super().__init__()
        self._small, self._main, self._ghosts = _Queue(), _Queue(), _Queue()
        self._uses: dict[StoreKey, int] = {}  # keys used since they came or last went round, at most _MAX_USES

    def _queues(self) -> tuple[_Queue, ...]:
        return (self._small, self._main)

    def _insert(self, key: StoreKey, size: int) -> None:
        known = self._ghosts.drop(key) is not None
        (self._main if known else self._small).push(key, size)

    def _hit(self, key: StoreKey) -> None:
        if key in self._small or key in self._main:
            self._uses[key] = min(self._uses.get(key, 0) + 1, self._MAX_USES)

    def _next(self) -> _Next | None:
        while True:
            small_share = self._SMALL_SHARE * (self._small.num_bytes + self._main.num_bytes)
            if len(self._small) and (self._small.num_bytes >= small_share or not len(self._main)):
                key, size = self._small.pop()
                if not self._uses.pop(key, 0):
                    return _Next(key, size, self._ghosts)
                self._main.push(key, size)
            elif len(self._main):
                key, size = self._main.pop()
                uses = self._uses.pop(key, 0)
                if not uses:
                    return _Next(key, size, self._ghosts)
                if uses > 1:
                    self._uses[key] = uses - 1
                self._main.push(key, size)
            else:
                return None

    def _readmit(self, key: StoreKey, size: int) -> None:
        self._main.push(key, size)

    def _drop(self, key: StoreKey) -> int | None:
        self._uses.pop(key, None)
        return super()._drop(key)


class ARC(EvictionPolicy):
    """Adaptive replacement (Megiddo and Modha, FAST 2003), in bytes: ghosts that return move the border."""

    def __init__(self) -> None:
        super().__init__()
        self._once, self._again = _Queue(), _Queue()
        self._once_ghosts, self._again_ghosts = _Queue(), _Queue()
        self._once_target = 0.0  # bytes that values used once should have

    def _queues(self) -> tuple[_Queue, ...]:
        return (self._once, self._again)

    def _insert(self, key: StoreKey, size: int) -> None:
        once, again = self._once_ghosts.num_bytes, self._again_ghosts.num_bytes
        if self._once_ghosts.drop(key) is not None:
            self._once_target += size * max(1.0, again / once)
        elif self._again_ghosts.drop(key) is not None:
            self._once_target -= size * max(1.0, once / again)
        else:
            self._once.push(key, size)
            return
        self._again.push(key, size)
        self._once_target = min(max(self._once_target, 0.0), float(self._once.num_bytes + self._again.num_bytes))

    def _hit(self, key: StoreKey) -> None:
        size = self._once.drop(key)
        if size is not None:
            self._again.push(key, size)
        elif key in self._again:
            self._again.to_back(key)

    def _next(self) -> _Next | None:
        if len(self._once) and (self._once.num_bytes > self._once_target or not len(self._again)):
            return _Next(*self._once.pop(), self._once_ghosts)
        return _Next(*self._again.pop(), self._again_ghosts) if len(self._again) else None

    def _readmit(self, key: StoreKey, size: int) -> None:
        self._again.push(key, size)


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU, "s3fifo": S3FIFO, "arc": ARC}


def make_policy(name: str) -> EvictionPolicy:
    """A new policy by its configured name."""
    if name not in POLICIES:
        raise ConfigError(f"eviction {name!r} is not known; allowed are {', '.join(POLICIES)}")
    return POLICIES[name]()
