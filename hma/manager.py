"""`HybridMemoryManager`: who owns which block now. An engine calls it once per step for the whole batch.

    admit ─► row, hit ──► reserve(rows, n) ─► engine computes n tokens a row ─► commit(rows, accepted) ─┐
                             ▲   tables, slots, copies                                                  │
                             └──────────────────────────────────────────────────────────────────────────┘
    preempt(row): gives its blocks back, resume(row) looks them up again;  release(row): the request has ended.

Reserve is all or nothing. Only committed tokens get a key and move windows, so a rejected draft is never cached and a
window never slides past what the next query reads. Steps are committed in the order in which they were reserved; blocks
of a row that leaves while a step is in flight stay held until that step is committed. Not thread-safe, by contract:
transfers and other threads hand in their results at a step boundary.

The calls stand, one layer on the other, in `core` (state, and what can be asked), `requests`, `stepping`, `lower_tiers`
(loads and what else offloading needs) and here (what its users steer in the cache).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy.typing as npt

from kvtide.kvcache.sizes import parse_bytes

from .cache import Pin
from .events import KvEvent
from .hashing import Item, KeyChain, as_token_bytes, namespace
from .lower_tiers import TierCalls


class HybridMemoryManager(TierCalls):
    """The memory manager of one rank.

    `memory` is in bytes (or text such as "64GiB"); `max_model_len` defaults to the layout's; `max_step_tokens` is the
    most tokens of one row in one step. `lookahead` slots are reserved beyond every step's tokens, for drafts.
    `drop_last_block` serves drafters that must recompute the last block of a hit. `model_id` and `hash_key` separate
    caches; `key_space` says instead what the keys stand for, so that ranks with different shares of one model agree on
    them. `events` keeps `take_events` filled. `pin_memory` page-locks the tables (needs torch). `ConfigError` for
    arguments out of range.
    """

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
