"""The figures of a run that a planner reads, of simulated and of real runs: latencies by percentile, and makespan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtide.kvcache import ConfigError


class Spread(NamedTuple):
    """A distribution in seconds: mean and percentiles, by linear interpolation."""

    mean: float
    p50: float
    p90: float
    p99: float


class Measures(NamedTuple):
    """Latencies and the time from the first arrival to the last token."""

    makespan_s: float
    ttft: Spread
    tpot: Spread

    def named(self) -> dict[str, float]:
        """The figures that calibration compares, by name."""
        return {
            "makespan": self.makespan_s,
            "TTFT mean": self.ttft.mean,
            "TTFT p50": self.ttft.p50,
            "TTFT p99": self.ttft.p99,
            "TPOT mean": self.tpot.mean,
            "TPOT p50": self.tpot.p50,
            "TPOT p99": self.tpot.p99,
        }


def measure(makespan_s: float, ttft: Sequence[float], tpot: Sequence[float]) -> Measures:
    """Measures of one run; `ConfigError` when no request has a second token to time."""
    if not ttft or not tpot:
        raise ConfigError("a run needs at least one request with two output tokens to be measured")
    return Measures(makespan_s, spread(ttft), spread(tpot))


def spread(values: Sequence[float]) -> Spread:
    """Mean and percentiles of some values, at least one."""
    array = np.array(values, dtype=np.float64)
    return Spread(float(array.mean()), *(float(np.percentile(array, p)) for p in (50, 90, 99)))
