"""What all benchmarks share: figures with their peer and target, the table, the JSON file, versions and machine.

A figure is one measured number of kvtide, and the peer's where one ran beside it in the same run. `ratio` is
peer / value: how many times less kvtide costs. A peer that is absent leaves `peer`, `ratio` and what depends on them
null; nothing is filled in from elsewhere.
"""

from __future__ import annotations

import json
import operator
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

Command = Callable[..., Any]

_BOUNDS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Target:
    """A bound on a figure's `ratio` or `value`, such as `Target("ratio", ">=", 100)`."""

    field: str
    bound: str
    limit: float

    def __str__(self) -> str:
        return f"{self.field} {self.bound} {self.limit:g}"


@dataclass(frozen=True)
class Figure:
    """One line of a report; `note` says in a few words what it is."""

    name: str
    value: float | None
    unit: str
    peer: float | None = None
    target: Target | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times less than the peer; null without a peer."""
        return self.peer / self.value if self.peer is not None and self.value else None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; null without a target or without what it is about."""
        measured = None if self.target is None else getattr(self, self.target.field)
        if self.target is None or measured is None:
            return None
        return _BOUNDS[self.target.bound](measured, self.target.limit)

    def as_json(self) -> dict[str, Any]:
        """The figure as it stands in the JSON file."""
        return {
            "value": self.value,
            "unit": self.unit,
            "peer": self.peer,
            "ratio": self.ratio,
            "target": None if self.target is None else str(self.target),
            "met": self.met,
        }


def alternate(repetitions: int, *contestants: Callable[[], float] | None) -> list[float | None]:
    """Run the contestants in turn, `repetitions` times over; each one's median. An absent one gives None.

    Taking turns spreads a noisy neighbour over all of them. A turn is two calls, of which the second counts: the first
    finds the processor's caches full of what the others did.
    """
    samples: list[list[float]] = [[] for _ in contestants]
    for _ in range(repetitions):
        for contestant, results in zip(contestants, samples, strict=True):
            if contestant is not None:
                contestant()
                results.append(contestant())
    return [statistics.median(results) if results else None for results in samples]


def scaled(value: float | None, factor: float) -> float | None:
    """`value * factor`, and None for None."""
    return None if value is None else value * factor


def common_options(function: Command) -> Command:
    """The options that every benchmark takes."""
    function = click.option(
        "--smoke", is_flag=True, hidden=True, help="Tiny sizes: the code runs, figures mean little."
    )(function)
    function = click.option(
        "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here too."
    )(function)
    return click.option("--quick", is_flag=True, help="Smaller sizes, fewer repetitions: under a minute.")(function)


def publish(
    title: str, figures: Sequence[Figure], json_file: Path | None, peer_versions: Mapping[str, str] | None = None
) -> None:
    """Print the table, and write the JSON file if one is asked for."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=title, title_justify="left")
    for heading in ("figure", "kvtide", "peer", "ratio", "target", "met", "what"):
        table.add_column(heading, justify="left" if heading in ("figure", "target", "what") else "right")
    for figure in figures:
        table.add_row(
            figure.name,
            _text(figure.value, figure.unit),
            _text(figure.peer, figure.unit),
            "–" if figure.ratio is None else f"{figure.ratio:.3g}×",
            "" if figure.target is None else str(figure.target),
            {True: "yes", False: "NO", None: ""}[figure.met],
            figure.note,
        )
    console.print(table)
    versions = {**_versions(), **(peer_versions or {})}
    machine = _machine()
    console.print(", ".join(f"{name} {version}" for name, version in versions.items()), highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), highlight=False)
    if json_file is not None:
        document = {
            "figures": {figure.name: figure.as_json() for figure in figures},
            "versions": versions,
            "machine": machine,
        }
        json_file.write_text(json.dumps(document, indent=2) + "\n")


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    return f"{value:.2%}" if unit == "fraction" else f"{value:,.4g} {unit}"


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in ("kvtide", "numpy")}}


def _machine() -> dict[str, Any]:
    return {
        "cpu": _first_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(int((_first_field("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _first_field(path: str, name: str) -> str | None:
    try:
        lines: Iterable[str] = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
