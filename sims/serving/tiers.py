"""Offload tiers in virtual time: what they hold, under the real eviction and admission policies, and how fast they are.

    device ─put─► nearest tier ─► the tiers below, at once (write through) or when it evicts (write on evict)
    device ◄─get─ the nearest tier that has a value; what a lower tier had is copied into the nearest one

A tier is a size, a bandwidth each way and a latency. `TierStack` answers as a store does and holds no bytes, only keys
and sizes; `transfers.py` gives it time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtide.kvcache import ConfigError
from kvtide.kvcache.sizes import parse_bytes
from kvtide.offload.admission import TinyLFU
from kvtide.offload.eviction import POLICIES, make_policy
from kvtide.offload.keys import StoreKey
from kvtide.offload.store import Status
from kvtide.offload.transfers import Value
from kvtide.offload.values import HEADER_BYTES

DEFAULT_EVICTION = "s3fifo"
WRITE_POLICIES = ("write_through", "write_on_evict")
# Keys whose uses admission remembers; as in `connectors.tiers`.
_SKETCHED_KEYS = 1 << 18
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class TierSpec:
    """One tier. `capacity` is in bytes for the whole engine, `bandwidth` in bytes/s each way for each rank.

    `latency_s` is added to every transfer. Values are taken from the `min_uses`-th recent use of their key on.
    """

    name: str
    capacity: int
    bandwidth: float
    latency_s: float = 0.0
    eviction: str = DEFAULT_EVICTION
    min_uses: int = 1

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"tier {self.name!r} must be named with letters, digits, - and _")
        if self.capacity < 1 or not 0 < self.bandwidth < float("inf"):
            raise ConfigError(f"tier {self.name} must have a size and a bandwidth above 0")
        if not 0 <= self.latency_s < 60:
            raise ConfigError(f"tier {self.name} has a latency of {self.latency_s} s; allowed are 0 to 60 s")
        if self.eviction not in POLICIES:
            raise ConfigError(f"tier {self.name}: eviction {self.eviction!r} is not one of {', '.join(POLICIES)}")
        if not 1 <= self.min_uses <= 16:
            raise ConfigError(f"tier {self.name}: min_uses {self.min_uses} must be from 1 to 16")


def parse_tier(text: str) -> TierSpec:
    """`NAME:SIZE:BANDWIDTH[:LATENCY][:eviction=NAME][:min_uses=N]`, such as `host:64GB:50GB/s:10us:eviction=arc`.

    `ConfigError` says which part is wrong.
    """
    name, *parts = text.split(":")
    options = dict(part.split("=", 1) for part in parts if "=" in part)
    plain = [part for part in parts if "=" not in part]
    if not 2 <= len(plain) <= 3 or set(options) - {"eviction", "min_uses"}:
        raise ConfigError(
            f"offload tier {text[:80]!r} must be NAME:SIZE:BANDWIDTH[:LATENCY][:eviction=NAME][:min_uses=N], such as "
            "host:64GB:50GB/s:10us"
        )
    speed, slash, second = plain[1].rpartition("/")
    if not slash or second.strip() != "s":
        raise ConfigError(f"offload tier {name}: bandwidth {plain[1][:40]!r} must be bytes per second, such as 50GB/s")
    uses = options.get("min_uses", "1")
    if not (uses.isascii() and uses.isdigit()):
        raise ConfigError(f"offload tier {name}: min_uses {uses[:40]!r} must be a whole number")
    return TierSpec(
        name,
        parse_bytes(plain[0]),
        float(parse_bytes(speed)),
        _parse_seconds(name, plain[2]) if len(plain) == 3 else 0.0,
        options.get("eviction", DEFAULT_EVICTION),
        int(uses),
    )


def _parse_seconds(name: str, text: str) -> float:
    text = text.strip()
    unit = next((unit for unit in ("ns", "us", "ms", "s") if text.endswith(unit)), "")
    try:
        return float(text.removesuffix(unit)) * _SECONDS[unit]
    except (ValueError, KeyError):
        raise ConfigError(f"offload tier {name}: latency {text[:40]!r} must be a time, such as 10us or 2ms") from None


class TierUse(NamedTuple):
    """What a tier holds, in bytes by layer kind, and what it has done: bytes read, written and evicted.

    `bytes_by_kind` and `free_bytes` add up to `capacity`, which is of one rank.
    """

    name: str
    capacity: int
    bytes_by_kind: dict[str, int]
    free_bytes: int
    read_bytes: int
    written_bytes: int
    evicted_bytes: int
    refused_values: int


class _Held(NamedTuple):
    """A value's bytes on a tier, and the kind of its layers."""

    num_bytes: int
    kind: str


class VirtualTier:
    """Keys and sizes under an eviction policy and, with `min_uses`, admission. `capacity` is of one rank."""

    def __init__(self, spec: TierSpec, capacity: int) -> None:
        self.spec, self.capacity = spec, capacity
        self.used = 0
        self.counts: Counter[str] = Counter()
        self._policy = make_policy(spec.eviction)
        self._values: dict[StoreKey, _Held] = {}
        self._bytes_by_kind: Counter[str] = Counter()
        self._sketch = TinyLFU(_SKETCHED_KEYS) if spec.min_uses > 1 else None

    def __contains__(self, key: StoreKey) -> bool:
        return key in self._values

    def use(self, keys: Sequence[StoreKey]) -> None:
        """Keys were read, or asked for: what is there is worth more from now on."""
        if self._sketch is not None:
            self._sketch.record(keys)
        for key in keys:
            if key in self._values:
                self._policy.on_hit(key)
                self.counts["read"] += self._values[key].num_bytes

    def touch_prefix(self, keys: Sequence[StoreKey]) -> None:
        """Keys are one prefix: the last go first."""
        self._policy.on_prefix(keys)

    def put(self, key: StoreKey, held: _Held, in_use: Counter[StoreKey]) -> tuple[Status, list[tuple[StoreKey, _Held]]]:
        """Take a value; what had to go for it comes back with the status."""
        if self._sketch is not None:
            self._sketch.record([key])
        if key in self._values:
            return Status.PRESENT, []
        if self._sketch is not None and self._sketch.frequency(key) < self.spec.min_uses:
            self.counts["refused"] += 1
            return Status.REFUSED, []
        gone = []
        lacking = self.used + held.num_bytes - self.capacity
        if lacking > 0 and held.num_bytes <= self.capacity:
            for victim in self._policy.victims(lacking, in_use):
                lost = self._values.pop(victim)
                self.used -= lost.num_bytes
                self._bytes_by_kind[lost.kind] -= lost.num_bytes
                self.counts["evicted"] += lost.num_bytes
                gone.append((victim, lost))
        if self.used + held.num_bytes > self.capacity:
            self.counts["refused"] += 1
            return Status.FULL, gone
        self._values[key] = held
        self.used += held.num_bytes
        self._bytes_by_kind[held.kind] += held.num_bytes
        self._policy.on_insert(key, held.num_bytes)
        self.counts["written"] += held.num_bytes
        return Status.STORED, gone

    def usage(self) -> TierUse:
        """Its use now."""
        return TierUse(
            self.spec.name,
            self.capacity,
            dict(self._bytes_by_kind),
            self.capacity - self.used,
            self.counts["read"],
            self.counts["written"],
            self.counts["evicted"],
            self.counts["refused"],
        )


class TierStack:
    """The tiers of one rank, the nearest first. `kinds` are the layers' kinds by their numbers in the model."""

    def __init__(
        self, specs: Sequence[TierSpec], capacities: Sequence[int], kinds: dict[int, str], write_policy: str
    ) -> None:
        if not specs:
            raise ConfigError("offload needs at least one tier")
        if len({spec.name for spec in specs}) < len(specs):
            raise ConfigError(f"offload tiers {', '.join(spec.name for spec in specs)} must have different names")
        if write_policy not in WRITE_POLICIES:
            raise ConfigError(f"write policy {write_policy!r} is not one of {', '.join(WRITE_POLICIES)}")
        self.tiers = [VirtualTier(spec, size) for spec, size in zip(specs, capacities, strict=True)]
        self.in_use: Counter[StoreKey] = Counter()
        self._kinds = kinds
        self._through = write_policy == "write_through"

    @property
    def num_written_at_once(self) -> int:
        """How many tiers a put writes to before it is done."""
        return len(self.tiers) if self._through else 1

    def where(self, key: StoreKey) -> int | None:
        """The nearest tier that has a value."""
        return next((number for number, tier in enumerate(self.tiers) if key in tier), None)

    def read(self, keys: Sequence[StoreKey]) -> None:
        """Values have been read: each counts as used where it was found, and is copied up."""
        for key in reversed(keys):  # as stores do: of a batch the first are used last
            number = self.where(key)
            for tier in self.tiers[:number]:  # asked on the way
                tier.use([key])
            if number is not None:
                self.tiers[number].use([key])
                if number:
                    self._put(0, key, self.tiers[number]._values[key])

    def write(self, values: Sequence[Value]) -> list[Status]:
        """Values have come from the device: what became of each, on the tier that took it best."""
        statuses = []
        for value in values:
            held = _Held(HEADER_BYTES + value.num_bytes, self._kinds[value.layers[0]])
            found = [self._put(number, value.key, held) for number in range(self.num_written_at_once)]
            good = [status for status in found if status in (Status.STORED, Status.PRESENT)]
            statuses.append(good[0] if good else found[0])
        self.touch_prefix(
            [value.key for value, status in zip(values, statuses, strict=True) if status is Status.STORED]
        )
        return statuses

    def touch_prefix(self, keys: Sequence[StoreKey]) -> None:
        """Keys are one prefix from its first block on."""
        for tier in self.tiers:
            tier.touch_prefix(keys)

    def _put(self, number: int, key: StoreKey, held: _Held) -> Status:
        status, gone = self.tiers[number].put(key, held, self.in_use)
        if not self._through and number + 1 < len(self.tiers):
            for victim, lost in gone:
                self._put(number + 1, victim, lost)
        return status
