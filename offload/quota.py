"""How much each owner (a salt, a tenant) may keep in a store: a hard bound, kept by giving up the owner's own values.

Values that the store evicts on its own are not heard of and stay on their owner's account until they are the oldest on
it: an account may be too high, and is never too low. So no owner ever keeps more than its bound, and no owner's values
go for another's.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from .eviction import LRU
from .keys import StoreKey


class Quotas:
    """Accounts in bytes. `limits` by owner; `default` for the others, None for no bound. Thread-safe."""

    def __init__(self, limits: Mapping[str, int], default: int | None) -> None:
        self._limits = dict(limits)
        self._default = default
        self._accounts: dict[str, LRU] = {}
        self._owners: dict[StoreKey, str] = {}
        self._lock = threading.Lock()

    def charge(self, owner: str, key: StoreKey, num_bytes: int) -> list[StoreKey] | None:
        """Put a value on the owner's account: the values to give up for it, the longest unused; None: it never fits."""
        limit = self._limits.get(owner, self._default)
        if limit is None:
            return []
        if num_bytes > limit:
            return None
        with self._lock:
            if key in self._owners:
                return []
            account = self._accounts.setdefault(owner, LRU())
            given_up = account.victims(account.num_bytes + num_bytes - limit)
            for victim in given_up:
                del self._owners[victim]
            account.on_insert(key, num_bytes)
            self._owners[key] = owner
            return given_up

    def used(self, keys: Sequence[StoreKey]) -> None:
        """Values were read."""
        with self._lock:
            for key in reversed(keys):
                if key in self._owners:
                    self._accounts[self._owners[key]].on_hit(key)

    def order(self, keys: Sequence[StoreKey]) -> None:
        """Values are one prefix: of an account the last go first."""
        with self._lock:
            for key in reversed(keys):
                if key in self._owners:
                    self._accounts[self._owners[key]].on_prefix([key])

    def release(self, keys: Sequence[StoreKey]) -> None:
        """Values are gone, or were not stored after all."""
        with self._lock:
            for key in keys:
                owner = self._owners.pop(key, None)
                if owner is not None:
                    account = self._accounts[owner]
                    account.on_remove(key)
                    if not len(account):
                        del self._accounts[owner]

    def num_bytes(self, owner: str) -> int:
        """What is on an owner's account."""
        with self._lock:
            account = self._accounts.get(owner)
            return account.num_bytes if account is not None else 0
