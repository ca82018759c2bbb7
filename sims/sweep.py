"""A sweep: every combination of some flags' values is a point, and every point is simulated once.

    Grid ─► points ─► processes or a cluster (sweep_workers.py) ─► Journal, a line per point ─► table (CSV, Parquet)

The journal is the truth: a point is done when its line is on the disk. So a sweep that was killed goes on where it was,
and one that is given more values computes only what is new. A point that cannot be simulated has its reason there.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvtide.kvcache import ConfigError

FORMAT = 1
MAX_POINTS = 1_000_000


@dataclass(frozen=True)
class Point:
    """One combination: the value of each axis as text, None for a flag that is left at its default."""

    values: tuple[tuple[str, str | None], ...]

    @property
    def key(self) -> str:
        """What names the point in the journal."""
        return json.dumps(dict(self.values), sort_keys=True)


@dataclass(frozen=True)
class Grid:
    """Axes and their values, in the order in which they were given. `ConfigError` for an empty or repeated one."""

    axes: Mapping[str, tuple[str | None, ...]]

    def __post_init__(self) -> None:
        if not self.axes:
            raise ConfigError("a sweep needs something to vary; give --vary FLAG=VALUE,VALUE or --grid FILE")
        for axis, values in self.axes.items():
            if not values:
                raise ConfigError(f"--vary {axis} has no values")
            if len(set(values)) < len(values):
                raise ConfigError(f"--vary {axis} has a value twice: {', '.join(map(str, values))}")
        if len(self) > MAX_POINTS:
            raise ConfigError(f"the sweep has {len(self):,} points; at most {MAX_POINTS:,} are allowed")

    def __len__(self) -> int:
        count = 1
        for values in self.axes.values():
            count *= len(values)
        return count

    def points(self) -> Iterator[Point]:
        """All points; the last axis changes fastest."""
        for values in product(*self.axes.values()):
            yield Point(tuple(zip(self.axes, values, strict=True)))


@dataclass(frozen=True)
class Result:
    """What became of a point: its figures, or the sentence that says why there are none."""

    figures: Mapping[str, Any] | None = None
    error: str | None = None


class Journal:
    """The results of a sweep, a JSON line each, appended when a point is done; a context manager that locks the file.

    `sweep` describes everything but the grid's values that results depend on. `ConfigError` when the file is of another
    sweep, cannot be read, or is in use. What a killed writer left of its last line is cut off.
    """

    def __init__(self, path: Path, sweep: Mapping[str, Any]) -> None:
        self.path = path
        self.results: dict[str, Result] = {}
        self._sweep = {"kvtide_sweep": FORMAT, **sweep}

    def __enter__(self) -> Self:
        try:
            self._file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written: {error.strerror}") from None
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(f"{self.path} is in use: another sweep writes to it") from None
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, point: Point, result: Result) -> None:
        """A point is done. When this returns, its line is on the disk."""
        self.results[point.key] = result
        self._append({"point": dict(point.values), "figures": result.figures, "error": result.error})

    def _append(self, value: Mapping[str, Any]) -> None:
        line = json.dumps(value, allow_nan=False).encode() + b"\n"
        written = 0
        while written < len(line):
            written += self._file.write(line[written:])
        os.fsync(self._file.fileno())

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)
        lines = content[:whole].splitlines()
        if not lines:
            self._append(self._sweep)
            return
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
                if number == 1:
                    self._check(value)
                    continue
                point = Point(tuple(value["point"].items()))
                self.results[point.key] = Result(value["figures"], value["error"])
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(f"{self.path}: line {number} is no result of a sweep; remove the file") from None

    def _check(self, found: Mapping[str, Any]) -> None:
        if found.get("kvtide_sweep") != FORMAT:
            raise ConfigError(f"{self.path} is no journal of a sweep; name another file for the results")
        for key, mine in json.loads(json.dumps(self._sweep)).items():
            if found.get(key) != mine:
                raise ConfigError(
                    f"{self.path} holds results of another sweep: {key.replace('_', ' ')} differs; remove it, or name "
                    "another file for the results"
                )


def rows_of(grid: Grid, results: Mapping[str, Result]) -> list[dict[str, Any]]:
    """A row per point that has a result, in the grid's order: the axes, `error`, then the figures.

    Values of an axis become numbers if all of them are; a point that failed has None for every figure.
    """
    names = list(dict.fromkeys(name for result in results.values() for name in result.figures or ()))
    typed = {axis: dict(zip(values, _numbers(values), strict=True)) for axis, values in grid.axes.items()}
    rows = []
    for point in grid.points():
        result = results.get(point.key)
        if result is not None:
            figures = result.figures or {}
            axes = {axis: typed[axis][value] for axis, value in point.values}
            rows.append({**axes, "error": result.error, **{name: figures.get(name) for name in names}})
    return rows


def _numbers(values: Sequence[str | None]) -> Sequence[Any]:
    given = [value for value in values if value is not None]
    for kind in (int, float):
        try:
            return [kind(value) for value in given] if len(given) == len(values) else values
        except ValueError:
            continue
    return values
