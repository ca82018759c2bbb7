"""`kvtide sweep`: simulate every combination of some flags' values, on all cores or on a Dask cluster, and compare."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvtide.kvcache import ConfigError, KvtideError
from kvtide.kvcache.documents import read_yaml
from kvtide.sims.report.charts import COMPARED
from kvtide.sims.report.figures import row_of
from kvtide.sims.sweep import Grid, Journal, Point, Result, rows_of
from kvtide.sims.sweep_table import check_table, write_table
from kvtide.sims.sweep_workers import run_in_processes, run_on_dask

from . import simulate
from .options import console
from .reporting import check_outputs, write_whole

# What a point has no use for: where reports go.
NOT_SWEPT = ("explain", "compare", "json_file", "html_file")
SHOWN_ROWS, SHOWN_FAILURES = 40, 5


@click.command("sweep", context_settings={"ignore_unknown_options": True})
@click.option(
    "--vary", multiple=True, metavar="FLAG=VALUE,VALUE,...", help="A flag of `kvtide simulate` and its values."
)
@click.option(
    "--grid",
    "grid_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A YAML file instead: flags with their lists of values, for values with commas in them.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Results, .csv or .parquet; beside it FILE.points.jsonl, by which a sweep that was stopped goes on.",
)
@click.option(
    "--html",
    "html_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page that compares the points.",
)
@click.option("--jobs", type=click.IntRange(1, 1024), help="Processes; by default one per core.")
@click.option("--dask", metavar="ADDRESS", help="Simulate on the Dask cluster of this scheduler instead.")
@click.option("--retry-failed", is_flag=True, help="Simulate points again that failed before.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="SIMULATE_FLAGS...")
def command(
    vary: tuple[str, ...],
    grid_file: Path | None,
    out: Path,
    html_file: Path | None,
    jobs: int | None,
    dask: str | None,
    retry_failed: bool,
    flags: tuple[str, ...],
) -> None:
    """Simulate every combination of some flags' values. All other flags are those of `kvtide simulate`.

    \b
    Examples:
      kvtide sweep --model config.json --trace demo --gpu h200 --vary max-num-seqs=64,128,256 --out seqs.csv
      kvtide sweep --model config.json --trace demo --gpu h200 --vary kv-cache-dtype=auto,fp8 \\
        --vary gpu=h100,h200 --out sweep.parquet --html sweep.html
      kvtide sweep --model config.json --trace demo --grid grid.yaml --out sweep.csv --dask tcp://head:8786
    """
    if dask and jobs:
        raise ConfigError("--jobs is about processes of this machine; a Dask cluster has its own workers")
    check_table(out)
    check_outputs(str(out), html_file)
    grid = read_grid(vary, grid_file)
    first = next(grid.points())
    # What is wrong with all points is said at once, and not once per point.
    base = _parsed(flags, first)
    journal = out.with_name(out.name + ".points.jsonl")
    sweep = {
        "axes": sorted(grid.axes),
        "flags": shlex.join(flags),
        "version": metadata.version("kvtide"),
        "input_files": _stamps(base),
    }
    with Journal(journal, sweep) as done:
        left = [
            point
            for point in grid.points()
            if (known := done.results.get(point.key)) is None or (retry_failed and known.error is not None)
        ]
        _run(left, len(grid), partial(run_point, flags), done, jobs or os.cpu_count() or 1, dask)
        rows = rows_of(grid, done.results)
    write_table(out, rows)
    if html_file is not None:
        from kvtide.sims.report.page import sweep_page

        knobs = {name: value for name, value in base.items() if value not in (None, (), "") and name not in NOT_SWEPT}
        write_whole(html_file, sweep_page(rows, list(grid.axes), knobs))
    _print(rows, list(grid.axes), out)


def read_grid(vary: Sequence[str], grid_file: Path | None) -> Grid:
    """The grid of the command line or of a file; `ConfigError` for what is no flag of `kvtide simulate`."""
    if vary and grid_file is not None:
        raise ConfigError("give --vary or --grid, not both")
    axes: dict[str, tuple[str | None, ...]] = {}
    for text in vary:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ConfigError(f"--vary {text[:60]!r} must be FLAG=VALUE,VALUE,...")
        axis = _flag_name(name)
        if axis in axes:
            raise ConfigError(f"--vary {axis} is given twice")
        axes[axis] = tuple(value.strip() for value in values.split(","))
    if grid_file is not None:
        document = read_yaml(grid_file, "grid.yaml")
        for name, listed in document.data.items():
            if not isinstance(listed, list) or any(isinstance(value, list) for value in listed):
                raise ConfigError(f"{document.label}: {str(name)[:60]} must have a list of values")
            axes[_flag_name(str(name))] = tuple(map(_value_text, listed))
    return Grid(axes)


def _flag_name(name: str) -> str:
    given = name.strip().lstrip("-").replace("_", "-")
    option = _options().get(f"--{given}")
    if option is None or option.name in NOT_SWEPT:
        raise ConfigError(f"{name[:60]!r} is no flag of `kvtide simulate` that can be varied")
    return given


def _value_text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _options() -> dict[str, click.Option]:
    return {
        name: parameter
        for parameter in simulate.command.params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
    }


def arguments_of(flags: Sequence[str], point: Point) -> list[str]:
    """The command line of one point; `ConfigError` for an on-off flag that is neither true nor false."""
    arguments = list(flags)
    for axis, value in point.values:
        if value is None:
            continue
        option = _options()[f"--{axis}"]
        if not option.is_flag:
            arguments += [f"--{axis}", value]
        elif value in ("true", "false"):
            if value == "true":
                arguments.append(f"--{axis}")
            elif option.secondary_opts:
                arguments.append(option.secondary_opts[0])
        else:
            raise ConfigError(f"--{axis} is on or off; its values must be true and false, not {value[:60]!r}")
    return arguments


def _parsed(flags: Sequence[str], point: Point) -> dict[str, Any]:
    """Parameters of `kvtide simulate` for a point; what is not about the point's own values is an error."""
    try:
        with simulate.command.make_context("sweep", arguments_of(flags, point)) as context:
            parameters: dict[str, Any] = context.params
    except (click.NoSuchOption, click.MissingParameter, click.BadOptionUsage) as error:
        raise ConfigError(
            f"{error.format_message()} (flags that the sweep does not know are `kvtide simulate`'s)"
        ) from None
    except (click.ClickException, KvtideError):
        return {}
    for name in NOT_SWEPT:
        if parameters[name]:
            raise ConfigError("--explain, --compare and --json are about one run; a sweep has --out and --html")
    return parameters


def _stamps(parameters: Mapping[str, Any]) -> dict[str, list[int]]:
    """Size and time of the files that flags name, so that results of an older file are not taken for a newer one's."""
    stamps = {}
    for value in parameters.values():
        if isinstance(value, str) and len(value) < 1024 and os.path.isfile(value):  # noqa: PTH113 - any text may come
            status = Path(value).stat()
            stamps[value] = [status.st_size, status.st_mtime_ns]
    return stamps


def run_point(flags: Sequence[str], point: Point) -> Result:
    """Simulate one point, in whatever process; a failure is a result."""
    try:
        with simulate.command.make_context("sweep", arguments_of(flags, point)) as context:
            options = {name: value for name, value in context.params.items() if name not in NOT_SWEPT}
        deployment, requests = simulate.plan(**options)
        return Result(row_of(simulate.simulate(deployment, requests, options, bar=False)))
    except click.ClickException as error:
        message = error.format_message()
    except KvtideError as error:
        message = str(error)
    except MemoryError:
        message = "there was not enough memory"
    except Exception as error:  # a fault of one point must not end the others
        message = f"unexpected {type(error).__name__}: {error}"
    return Result(error=" ".join(message.split()))


def _run(points: Sequence[Point], total: int, work: Any, journal: Journal, jobs: int, dask: str | None) -> None:
    err = Console(stderr=True)
    columns = (
        TextColumn("sweep"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        bar = progress.add_task("sweep", total=total, completed=total - len(points), failed=0)
        failed = 0

        def report(point: Point, result: Result) -> None:
            nonlocal failed
            journal.add(point, result)
            failed += result.error is not None
            progress.update(bar, advance=1, failed=failed)

        if dask:
            run_on_dask(points, work, report, dask)
        else:
            run_in_processes(points, work, report, min(jobs, max(len(points), 1)))


def _print(rows: Sequence[Mapping[str, Any]], axes: Sequence[str], out: Path) -> None:
    terminal = console()
    table = Table(title=f"Sweep over {', '.join(axes)}: {len(rows):,} points", title_justify="left")
    for axis in axes:
        table.add_column(axis.replace("-", " "))  # so that a narrow terminal wraps it
    for _, words, _ in COMPARED:
        table.add_column(words, justify="right")
    ran = [row for row in rows if row["error"] is None]
    for row in ran[:SHOWN_ROWS]:
        figures = (format(row[key], shown.replace("d", "")) for key, _, shown in COMPARED)
        table.add_row(*("default" if row[axis] is None else str(row[axis]) for axis in axes), *figures)
    if ran:
        terminal.print(table)
    if len(ran) > SHOWN_ROWS:
        terminal.print(f"... and {len(ran) - SHOWN_ROWS:,} points more")
    for row in [row for row in rows if row["error"] is not None][:SHOWN_FAILURES]:
        where = ", ".join(f"{axis}={row[axis]}" for axis in axes)
        terminal.print(f"failed      {where}: {row['error']}")
    terminal.print(f"results     {out}, {len(rows) - len(ran):,} of {len(rows):,} points failed")
