"""Where the bytes go at final length: every request of a workload, under every policy, by cause and by layer kind.

Each request is charged what it holds when its last token is computed, alone in its pages (input and output tokens, no
prefix sharing, no requests side by side). That is the figure that papers and RFCs quote; a running engine, whose
requests are shorter while they grow, shows less. All figures are bytes on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from kvtide.kvcache import ConfigError
from kvtide.kvcache.geometry import Charge, PageGeometry
from kvtide.kvcache.specs import Int64Array

from .traces import Request

# Requests accounted in one array operation: large enough to be fast, small enough to stay in cache.
BATCH = 8192
# Bytes of one request that int64 arithmetic can hold, with room for rounding up to blocks and pages.
MAX_BYTES = 2**61
MARGIN = 2**16


@dataclass
class KindWaste:
    """Bytes of one layer kind, summed over the workload: `allocated_bytes`, and `needed_bytes` of them."""

    allocated_bytes: int = 0
    needed_bytes: int = 0

    @property
    def waste_fraction(self) -> float:
        """1 − needed / allocated; 0 when nothing is allocated."""
        return waste_fraction(self.needed_bytes, self.allocated_bytes)


@dataclass
class Waste:
    """Bytes of a workload under one policy. `by_cause` has the fields of `Charge`; they add up to `allocated_bytes`."""

    policy: str
    by_cause: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Charge._fields, 0))
    by_kind: dict[str, KindWaste] = field(default_factory=dict)

    @property
    def allocated_bytes(self) -> int:
        """All bytes that the policy takes."""
        return sum(self.by_cause.values())

    @property
    def needed_bytes(self) -> int:
        """Bytes that the last token's query reads: the same under every policy."""
        return self.by_cause["needed"]

    @property
    def waste_fraction(self) -> float:
        """1 − needed / allocated; 0 when nothing is allocated."""
        return waste_fraction(self.needed_bytes, self.allocated_bytes)

    def add(self, geometry: PageGeometry, text_tokens: Int64Array, image_tokens: Int64Array) -> None:
        """Account a batch of requests; `ConfigError` when one is too long for its bytes to be counted."""
        longest = int((text_tokens + image_tokens).max(initial=0))
        per_token = sum(fmt.block_bytes * fmt.tables / max(fmt.block_size, 1) for fmt in geometry.formats)
        if (longest + MARGIN) * per_token + geometry.page_bytes * MARGIN >= MAX_BYTES:
            raise ConfigError(
                f"a request of {longest} tokens would take more than {MAX_BYTES} bytes under the policy {self.policy}"
            )
        for fmt in geometry.formats:
            charge = fmt.charge(*geometry.tokens_of(fmt, text_tokens, image_tokens))
            causes = {cause: _exact_sum(values) for cause, values in charge._asdict().items()}
            for cause, value in causes.items():
                self.by_cause[cause] += value
            kind = self.by_kind.setdefault(fmt.group.spec.kind, KindWaste())
            kind.allocated_bytes += sum(causes.values())
            kind.needed_bytes += causes["needed"]


@dataclass(frozen=True)
class WasteReport:
    """The workload's size and its waste under each policy."""

    requests: int
    tokens: int
    policies: tuple[Waste, ...]


def waste_fraction(needed: float, allocated: float) -> float:
    """1 − needed / allocated; 0 when nothing is allocated."""
    return 1 - needed / allocated if allocated else 0.0


def measure_waste(geometries: Sequence[PageGeometry], requests: Iterable[Request]) -> WasteReport:
    """Account every request at its final length under every geometry; one pass, constant memory."""
    wastes = tuple(Waste(geometry.policy) for geometry in geometries)
    count = tokens = 0
    for text, image in _batches(requests):
        count += len(text)
        tokens += int(text.sum() + image.sum())
        for geometry, waste in zip(geometries, wastes, strict=True):
            waste.add(geometry, text, image)
    return WasteReport(count, tokens, wastes)


def _exact_sum(values: Int64Array) -> int:
    """The sum as a Python int: the halves of the numbers cannot overflow, the numbers could."""
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())


def _batches(requests: Iterable[Request]) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Arrays of text tokens (output included) and image tokens per request."""
    stream = iter(requests)
    while batch := [(r.input_tokens + r.output_tokens, r.image_tokens) for r in islice(stream, BATCH)]:
        total, image = np.array(batch, dtype=np.int64).T
        yield total - image, image
