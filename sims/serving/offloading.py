"""The real `OffloadManager` under the scheduler: what is stored and loaded, with tiers and transfers in virtual time.

    admit ─► hit on the device ─► room for the whole sequence? ─► look-up ─► load on its way ─► ready, with a longer hit
                                                                     └─ nothing worth it ─────► ready at once

Plans, policies, holds and load reservations are `kvtide.offload`'s own code; only bytes and threads are missing. With
`swap` or `auto` a preempted request's blocks are copied out before its memory is given away, and the next step waits
for the copies; with `recompute` they are not, and only what had been stored before is loaded back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy.typing as npt

from kvtide.hma import Admission, HybridMemoryManager
from kvtide.kvcache import ConfigError, ModelLayout
from kvtide.kvcache.specs import Kind
from kvtide.offload.manager import MAX_HELD_SHARE, OffloadManager
from kvtide.offload.policies import DEFAULT_RULES, Action, Event, LoadPolicy, StorePolicy
from kvtide.offload.transfers import Transfers

from .tiers import TierSpec, TierStack, TierUse
from .transfers import VirtualTransfers

PREEMPTIONS = ("recompute", "swap", "auto")
# The manager counts each row that is given up, also those that only waited in the queue's head.
_NOT_REPORTED = ("load_cancelled", "swapped_out", "swap_not_worth_it")
WINDOW_ENDS = ("prompt_ends", "turn_ends", "junctions")


@dataclass(frozen=True)
class Offload:
    """Offload as configured: the tiers, the nearest first, what is stored when, and what preemption does.

    `only_swap` stores nothing but preempted requests: swap space, and no cache. `stores`, `loads`: the engine's role.
    """

    tiers: tuple[TierSpec, ...]
    store_policy: StorePolicy = field(default_factory=StorePolicy)
    write_policy: str = "write_through"
    preemption: str = "recompute"
    only_swap: bool = False
    stores: bool = True
    loads: bool = True

    def __post_init__(self) -> None:
        if self.preemption == "swap" and not (self.stores and self.loads):
            raise ConfigError("an engine that swaps must both store and load; its role must be kv_both")
        if self.preemption not in PREEMPTIONS:
            raise ConfigError(f"preemption {self.preemption!r} is not one of {', '.join(PREEMPTIONS)}")
        if self.only_swap and self.preemption == "recompute":
            raise ConfigError("swap space is for preempted requests; give --preemption swap or auto")

    def rules(self) -> dict[tuple[Event, Kind], Action]:
        """The store policy's rules. What is preempted is not stored: who preempts says so each time it is to be."""
        rules = dict(self.store_policy.rules)
        for event, kind in DEFAULT_RULES:
            if event is Event.PREEMPTED:
                rules[event, kind] = Action.KEEP
            elif self.only_swap and self.store_policy.stores(event, kind):
                rules[event, kind] = Action.DROP if event is Event.EVICTED else Action.KEEP
        return rules


class OffloadUse(NamedTuple):
    """What offload has done on one rank, so far.

    `loaded_tokens` of requests came from the tiers, of which `tier_tokens` says from which, in proportion to bytes.
    `swapped_out_bytes` were copied out for `swapped_out` preemptions, and steps waited `stalled_s` for that. `counts`
    are the manager's, of what was dropped or given up.
    """

    loaded_tokens: int
    tier_tokens: tuple[float, ...]
    tiers: tuple[TierUse, ...]
    stored_bytes: int
    swapped_out: int
    swapped_out_bytes: int
    stalled_s: float
    held_bytes: int
    counts: dict[str, int]


class OffloadedRows:
    """A manager's calls that offload takes part in, on one rank, and the time that transfers take."""

    def __init__(
        self,
        manager: HybridMemoryManager,
        offload: Offload,
        *,
        full_layout: ModelLayout,
        tensor: int,
        ranks: int,
        seconds_per_token: float,
    ) -> None:
        layout = manager.geometry.layout
        # A rank holds its share of every value: all of a latent, one part of the heads.
        share = layout.bytes_per_token / full_layout.bytes_per_token / ranks if full_layout.bytes_per_token else 1.0
        kinds = {layer.index: str(layer.spec.kind) for layer in layout.layers if layer.spec is not None}
        capacities = [max(int(spec.capacity * share), 1) for spec in offload.tiers]
        nearest = offload.tiers[0]
        always = offload.preemption == "swap"
        self.transfers = VirtualTransfers(TierStack(offload.tiers, capacities, kinds, offload.write_policy))
        self._swaps = offload.preemption != "recompute"
        self._rules = offload.rules()
        self._swapped_kinds = [place for place in self._rules if place[0] is Event.PREEMPTED]
        self._swapped_bytes = self._num_swapped = 0
        self.stalled_s = 0.0
        pool_bytes = manager.pool.num_pages * manager.geometry.page_bytes
        # The manager reads a clock for its patience with full staging memory; virtual time knows no hurry.
        self._manager = OffloadManager(
            manager,
            cast(Transfers, self.transfers),
            model=layout.name,
            full_layout=full_layout,
            tp_rank=0,
            tp_size=tensor,
            store_policy=replace(offload.store_policy, rules=self._rules),
            load_policy=LoadPolicy(
                min_tokens=1 if always else LoadPolicy.min_tokens,
                seconds_per_token=float("inf") if always else seconds_per_token,
                bytes_per_second=nearest.bandwidth,
                latency_s=nearest.latency_s,
                patience_s=float("inf"),
            ),
            stores=offload.stores,
            loads=offload.loads,
            max_held_bytes=pool_bytes if self._swaps else int(MAX_HELD_SHARE * pool_bytes),
        )

    def admit(
        self, request_id: str, token_ids: npt.ArrayLike, *, image_tokens: int, turn_ends: Sequence[int]
    ) -> Admission:
        """As the manager's; the row must be `begin`-ed before it is reserved for."""
        return self._manager.admit(request_id, token_ids, image_tokens=image_tokens, turn_ends=turn_ends)

    def resume(self, row: int) -> Admission:
        """As the manager's; likewise."""
        return self._manager.resume(row)

    def preempt(self, row: int) -> None:
        """Give a running row's blocks back, copied out first if preemption swaps."""
        if not self._swaps:
            self._manager.preempt(row)
            return
        before = self.transfers.put_bytes
        with self.transfers.waiting():
            self._rules.update(dict.fromkeys(self._swapped_kinds, Action.STORE))
            self._manager.preempt(row)
            self._rules.update(dict.fromkeys(self._swapped_kinds, Action.KEEP))
            self._manager.poll()  # ends the holds of what was copied out
        self._swapped_bytes += self.transfers.put_bytes - before
        self._num_swapped += self.transfers.put_bytes > before

    def give_up(self, row: int) -> None:
        """A waiting row could not enter: its hit and its load go back, and nothing is stored."""
        self._manager.preempt(row)

    def release(self, row: int) -> None:
        """As the manager's; what is left to store is stored."""
        self._manager.release(row)

    def commit(self, rows: npt.ArrayLike, num_accepted: npt.ArrayLike, token_ids: npt.ArrayLike) -> None:
        """As the manager's."""
        self._manager.commit(rows, num_accepted, token_ids)

    def poll(self) -> None:
        """Apply what transfers have brought by now; a row that begins looks further in the tiers."""
        self._manager.poll()

    def stall(self, start_s: float) -> float:
        """When a step that could begin now may begin: blocks that it writes to must have been copied out."""
        waited = max(self.transfers.stalled_until - start_s, 0.0)
        self.stalled_s += waited
        return start_s + waited

    def ready(self, row: int) -> bool:
        """Whether a row is not being loaded."""
        return self._manager.ready(row)

    def usage(self) -> OffloadUse:
        """What has happened so far."""
        stats = self._manager.stats()
        loaded = stats.tokens.get("store", 0)
        read = self.transfers.read_bytes
        total = max(int(read.sum()), 1)
        stored = sum(size for (what, _), size in stats.bytes_by_kind.items() if what == "stored")
        return OffloadUse(
            loaded,
            tuple(loaded * int(size) / total for size in read),
            tuple(tier.usage() for tier in self.transfers.stack.tiers),
            stored,
            self._num_swapped,
            self._swapped_bytes,
            self.stalled_s,
            stats.held_bytes,
            {name: count for name, count in stats.counts.items() if count and name not in _NOT_REPORTED},
        )


def store_policy_of(windows: str | None, rules: Sequence[str] = ()) -> StorePolicy:
    """A store policy from text: `windows` as `prompt_ends,junctions,every:2048`, `rules` as `EVENT:KIND=ACTION`."""
    chosen: dict[str, bool | int] = {}
    if windows is not None:
        names = [name.strip() for name in windows.split(",") if name.strip()]
        chosen = dict.fromkeys(WINDOW_ENDS, False)
        for name in names:
            if name in WINDOW_ENDS:
                chosen[name] = True
            elif name.startswith("every:") and name[6:].isascii() and name[6:].isdigit():
                chosen["every_tokens"] = int(name[6:])
            elif name != "none":
                raise ConfigError(
                    f"--offload-windows has {name[:40]!r}; allowed are {', '.join(WINDOW_ENDS)}, every:TOKENS and none"
                )
    parsed: dict[tuple[Event, Kind], Action] = {}
    for rule in rules:
        place, _, action = rule.partition("=")
        event, _, kind = place.partition(":")
        try:
            parsed[Event(event), Kind(kind)] = Action(action)
        except ValueError:
            raise ConfigError(
                f"--offload-rule {rule[:60]!r} must be EVENT:KIND=ACTION with an event of {', '.join(Event)}, a kind "
                f"of {', '.join(dict.fromkeys(kind for _, kind in DEFAULT_RULES))} and an action of {', '.join(Action)}"
            ) from None
    return StorePolicy(rules=parsed, **chosen)  # type: ignore[arg-type]
