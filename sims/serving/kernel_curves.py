"""Measured MLA decode kernels in the cost model: the curves that `benchmarks/gpu_mla.py --json` writes.

A figure `rows R kv N FORMAT` is the time of one layer's decode attention for 128 requests of N cached tokens with R
query rows each (heads times query tokens). A request's share of it, between the measured points, is interpolated in
logarithms; beyond them the time grows with tokens and rows, as bandwidth and FLOPs do, and below them it stays.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from os import PathLike

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import ConfigError
from kvtide.kvcache.documents import read_json
from kvtide.kvcache.specs import Int64Array

BATCH = 128  # requests of a measured step
# Longer queries are prompts, which other kernels compute.
MOST_QUERY_TOKENS = 8
_NAME = re.compile(r"rows (\d{1,9}) kv (\d{1,12}) (\w+)")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One cache format: `micros[i][j]` for `rows[i]` query rows and `kv[j]` tokens, both ascending."""

    rows: Int64Array
    kv: Int64Array
    micros: Floats

    def seconds(self, rows: Int64Array, kv: Int64Array) -> Floats:
        """Seconds of each request in one layer, in a full batch."""
        tokens = np.clip(kv, self.kv[0], self.kv[-1])
        at = np.stack([np.interp(np.log(tokens), np.log(self.kv), np.log(line)) for line in self.micros])
        place = np.interp(np.log(rows), np.log(self.rows), np.arange(len(self.rows)))
        low = np.minimum(place.astype(np.int64), len(self.rows) - 1)
        high = np.minimum(low + 1, len(self.rows) - 1)
        each = np.arange(len(tokens))
        inside = np.exp(at[low, each] + (place - low) * (at[high, each] - at[low, each]))
        beyond = np.maximum(kv / self.kv[-1], 1) * np.maximum(rows / self.rows[-1], 1)
        seconds: Floats = inside * beyond * 1e-6 / BATCH
        return seconds


@dataclass(frozen=True)
class KernelCurves:
    """Curves by cache format, and the GPU that they were measured on (empty if the file does not say)."""

    gpu: str
    curves: dict[str, Curve]

    def curve(self, dtype: str, gpu: str) -> Curve:
        """The curve of a cache format; `ConfigError` if it was not measured, or on another GPU."""
        if self.gpu and gpu.replace("-", " ").upper() not in self.gpu.upper():
            raise ConfigError(f"the kernel curves were measured on {self.gpu}, not on {gpu}")
        if dtype not in self.curves:
            raise ConfigError(f"the kernel curves have no cache format {dtype}; they have {', '.join(self.curves)}")
        return self.curves[dtype]


def read_kernel_curves(source: str | PathLike[str]) -> KernelCurves:
    """Read what `benchmarks/gpu_mla.py --json` wrote. `ConfigError` for another file, or one without measurements."""
    document = read_json(source, "gpu_mla.json")
    figures, versions = document.data.get("figures"), document.data.get("versions")
    if not isinstance(figures, dict):
        raise ConfigError(f"{document.label}: has no figures; it must be what benchmarks/gpu_mla.py --json wrote")
    measured: defaultdict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    for name, figure in figures.items():
        match = _NAME.fullmatch(name)
        value = figure.get("value") if isinstance(figure, dict) else None
        if match and isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12:
            measured[match[3]][int(match[1]), int(match[2])] = float(value)
    curves = {}
    for fmt, points in measured.items():
        kv = sorted({tokens for _, tokens in points})
        # A configuration that ran out of time is missing; rows are used where every length is there.
        rows = sorted({n for n, _ in points if all((n, tokens) in points for tokens in kv)})
        if rows and kv[0] and rows[0]:
            micros = np.array([[points[n, tokens] for tokens in kv] for n in rows])
            curves[fmt] = Curve(np.array(rows), np.array(kv), micros)
    if not curves:
        raise ConfigError(f"{document.label}: has no measured figure 'rows R kv N FORMAT'; was there a GPU?")
    gpu = versions.get("gpu") if isinstance(versions, dict) else None
    return KernelCurves(str(gpu or ""), curves)
