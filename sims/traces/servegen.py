"""Requests sampled from ServeGen's distributions: a folder of clients, each with a rate curve and length histograms.

`chunk-N-trace.csv` gives client N, per window, a rate and the shape of its inter-arrival times; `chunk-N-dataset.json`
gives, per longer window, histograms of lengths as text. Arrivals of all clients are merged window by window, so the
day is never held whole, and the same folder, seed and NumPy give the same requests. The fields of one request are
drawn independently. An image-token histogram is of the mean per image: a request has that many times its image count.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .fields import Place, seconds_text, value_of
from .request import Progress, Request
from .tracefile import TraceFile, show

DATASET_GLOB = "chunk-*-dataset.json"
_LONE_WINDOW_S = 600.0  # a client with a single window; the published ones are ten minutes long
_MAX_LENGTH = 1 << 30  # keeps length times count inside int64
_MAX_RATE_RPS = 1e4
_MAX_ARRIVALS = 10_000_000  # of one client in one window
_MEDIA = ("image", "audio", "video")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class _Window(NamedTuple):
    """A stretch of a client's rate curve; times in seconds."""

    start_s: float
    length_s: float
    num_arrivals: int
    pattern: str
    shape: float


class _Histogram(NamedTuple):
    """The values that a field takes and their cumulative probabilities."""

    values: Floats
    cumulative: Floats

    def sample(self, rng: np.random.Generator, size: int) -> Floats:
        places = np.searchsorted(self.cumulative, rng.random(size), side="right")
        return self.values[np.minimum(places, len(self.values) - 1)]


class _Batch(NamedTuple):
    """The requests of one client in one window, as columns."""

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    image_tokens: Ints
    reasoning_tokens: Ints  # -1: the client's data do not say


def sample_servegen(folder: Path, seed: int, progress: Progress) -> Iterator[Request]:
    """Yield sampled requests in order of arrival until the clients' day ends."""
    rng = np.random.Generator(np.random.PCG64(seed))
    progress.notes.append(f"requests are sampled from distributions with seed {seed}")
    clients = [_Client(path) for path in sorted(folder.glob(DATASET_GLOB), key=_natural_order)]
    for client in clients:
        if client.windows.keys() != clients[0].windows.keys():
            raise client.dataset.error("the client's windows do not start when those of the folder's first client do")
    number = 0
    for start in clients[0].windows:
        batches = []
        for client in clients:
            window = client.windows[start]
            if window.num_arrivals:
                batch = client.sample(window, rng)
                progress.num_skipped += window.num_arrivals - len(batch.arrival_s)
                batches.append(batch)
        if not batches:
            continue
        columns = [np.concatenate(column) for column in zip(*batches, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        for arrival, prompt, output, image, reasoning in zip(*(c[order].tolist() for c in columns), strict=True):
            yield Request(str(number), arrival, prompt, output, image, None if reasoning < 0 else reasoning)
            number += 1


def _natural_order(path: Path) -> tuple[int, str]:
    digits = re.search(r"\d{1,18}", path.name)
    return (int(digits.group()) if digits else 0, path.name)


class _Client:
    """One client: its windows, read at once, and its histograms, read when the first window with arrivals comes."""

    def __init__(self, dataset: Path) -> None:
        self.windows = _read_windows(TraceFile(dataset.with_name(dataset.name.replace("-dataset.json", "-trace.csv"))))
        self.dataset = TraceFile(dataset)
        self._texts: list[tuple[float, dict[str, str]]] | None = None
        self._current = -1
        self._histograms: dict[str, _Histogram] = {}

    def sample(self, window: _Window, rng: np.random.Generator) -> _Batch:
        """Draw the window's requests; those without a prompt are left out, all of them if there are no histograms."""
        histograms = self._histograms_at(window.start_s)
        if not histograms:
            empty = np.empty(0, np.int64)
            return _Batch(np.empty(0), empty, empty, empty, empty)
        size = window.num_arrivals
        arrival = _arrivals(window, rng)
        drawn = {name: histogram.sample(rng, size) for name, histogram in histograms.items()}
        ratio = drawn.pop("reason_ratio", None)
        lengths = {name: values.astype(np.int64) for name, values in drawn.items()}
        output = lengths["output_tokens"]
        none = np.zeros(size, np.int64)
        media = {kind: lengths.get(f"{kind}_tokens", none) * lengths.get(f"{kind}_count", none) for kind in _MEDIA}
        prompt = sum(media.values(), start=lengths["text_tokens" if "text_tokens" in lengths else "input_tokens"])
        reasoning = none - 1 if ratio is None else np.rint(output * ratio).astype(np.int64)
        kept = prompt > 0
        return _Batch(arrival[kept], prompt[kept], output[kept], media["image"][kept], reasoning[kept])

    def _histograms_at(self, start_s: float) -> dict[str, _Histogram]:
        """Return the histograms of the dataset window that holds, the nearest one where it is empty."""
        if self._texts is None:
            self._texts = _read_dataset(self.dataset)
        if not self._texts:
            return {}
        current = max(0, bisect_right([start for start, _ in self._texts], start_s) - 1)
        if current != self._current:
            self._current = current
            start, texts = self._texts[current]
            self._histograms = {
                name: _parse_histogram(text, f"{name} at {start:g} s", self.dataset) for name, text in texts.items()
            }
        return self._histograms


def _arrivals(window: _Window, rng: np.random.Generator) -> Floats:
    # The published scale does not agree with the published rate (it is a fit within bursts). As in ServeGen itself the
    # gaps keep their shape and are stretched so that the window holds the arrivals that its rate says.
    draw = rng.standard_gamma if window.pattern == "Gamma" else rng.weibull
    at = np.cumsum(draw(window.shape, window.num_arrivals + 1))
    if at[-1] > 0:
        at *= window.length_s / at[-1]
    return window.start_s + at[:-1]


def _read_windows(file: TraceFile) -> dict[float, _Window]:
    rows: list[tuple[float, float, str, float, int]] = []
    for record in file.records():
        if len(record) != 6:
            raise file.error(f"has {len(record)} fields, but must have window_start_s, rate, cv, pattern, shape, scale")
        start, rate = (seconds_text(record[i], name, file) for i, name in ((0, "window_start_s"), (1, "rate_rps")))
        pattern, shape = record[3].strip(), seconds_text(record[4], "shape", file)
        if rows and start <= rows[-1][0]:
            raise file.error(f"window_start_s is {start:g}, but must be more than that of the line before")
        if rate > _MAX_RATE_RPS:
            raise file.error(f"rate_rps is {rate:g}, but must be at most {_MAX_RATE_RPS:g}")
        if rate > 0 and (pattern not in ("Gamma", "Weibull") or shape <= 0):
            raise file.error(f"pattern is {show(pattern)} with shape {shape:g}, but must be Gamma or Weibull above 0")
        rows.append((start, rate, pattern, shape, file.line))
    starts = [row[0] for row in rows]
    lengths = [after - before for before, after in pairwise(starts)]
    lengths.append(lengths[-1] if lengths else _LONE_WINDOW_S)
    windows: dict[float, _Window] = {}
    for (start, rate, pattern, shape, line), length in zip(rows, lengths, strict=False):
        num_arrivals = round(rate * length)
        if num_arrivals > _MAX_ARRIVALS:
            file.line = line
            raise file.error(
                f"a window of {length:g} s at {rate:g} requests/s has more than {_MAX_ARRIVALS:,} requests"
            )
        windows[start] = _Window(start, length, num_arrivals, pattern, shape)
    return windows


def _read_dataset(file: TraceFile) -> list[tuple[float, dict[str, str]]]:
    """Return the windows' histograms as text, in order of time, without those that hold no data."""
    document = file.document()
    if type(document) is not dict:
        raise file.error(f"must hold a JSON object, not {show(document)}")
    windows: list[tuple[float, dict[str, str]]] = []
    for key, fields in document.items():
        start = seconds_text(key, "a window", file)
        if type(fields) is not dict:
            raise file.error(f"window {show(key)} is {show(fields)}, but must be a JSON object")
        prompt = "text_tokens" if "text_tokens" in fields else "input_tokens"
        media = [f"{kind}_{what}" for kind in _MEDIA if f"{kind}_tokens" in fields for what in ("tokens", "count")]
        names = [prompt, "output_tokens", *media, *(["reason_ratio"] if "reason_ratio" in fields else [])]
        texts = {name: value_of(fields, name, file) for name in names}
        for name, text in texts.items():
            if type(text) is not str:
                raise file.error(f"{name} in window {show(key)} is {show(text)}, but must be a histogram as a string")
        if all(text.strip() != "{}" for text in texts.values()):
            windows.append((start, texts))
    return sorted(windows, key=lambda window: window[0])


def _parse_histogram(text: str, name: str, place: Place) -> _Histogram:
    """Return the histogram written as `{value: probability, ...}`; the text is never evaluated."""
    body = text.strip()
    try:
        if not (body.startswith("{") and body.endswith("}")):
            raise ValueError
        pairs = np.array([item.split(":") for item in body[1:-1].split(",")], np.float64)
        if pairs.shape[1:] != (2,):
            raise ValueError
    except ValueError:
        raise place.error(f"{name} is {show(text)}, but must look like {{17: 0.25, 42: 0.75}}") from None
    values, weights = pairs[:, 0], pairs[:, 1]
    is_ratio = name.startswith("reason_ratio")
    if not (np.isfinite(pairs).all() and (values >= 0).all() and (values <= (1 if is_ratio else _MAX_LENGTH)).all()):
        raise place.error(f"{name} has a value outside 0 to {'1' if is_ratio else '2**30'}")
    if not is_ratio and (values != np.rint(values)).any():
        raise place.error(f"{name} has a value that is not a whole number")
    if (weights < 0).any() or not 0.99 <= weights.sum() <= 1.01:
        raise place.error(f"{name} has probabilities that are negative or do not add up to 1")
    return _Histogram(values, np.cumsum(weights) / weights.sum())
