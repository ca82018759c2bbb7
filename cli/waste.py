"""`kvtide waste`: where the KV bytes of a trace, or of one request, go under each policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvtide.kvcache.errors import ConfigError
from kvtide.kvcache.layout import ModelLayout
from kvtide.sims.traces import DEFAULT_TOKENS_PER_IMAGE, FORMATS, Request, Trace, open_trace
from kvtide.sims.waste import Waste, WasteReport, measure_waste

from .options import (
    block_options,
    console,
    geometries,
    human_bytes,
    json_option,
    load_layout,
    model_options,
    policy_option,
    print_json,
    require_positive,
)
from .replay import print_replay, replayable, report_json, run_replays

ABOUT_TRACES = ("trace_format", "trace_columns", "tokens_per_image", "seed", "num_requests", "replay")
ABOUT_REPLAYS = ("concurrency", "max_num_batched_tokens", "kv_from_activations")


@click.command("waste")
@model_options
@click.option("--trace", help="A trace file or folder, or `demo`; its format is found out from its content.")
@click.option("--tokens", type=int, help="Instead of a trace: one request of this many tokens.")
@click.option("--text-tokens", type=int, help="Instead of a trace: one request's text tokens.")
@click.option("--image-tokens", type=int, help="With --text-tokens: its image tokens.")
@policy_option
@block_options
@click.option(
    "--trace-format", type=click.Choice(list(FORMATS)), help="Format of the trace, instead of finding it out."
)
@click.option("--trace-columns", metavar="NAME=COLUMN,...", help="Columns of a generic CSV or JSONL file.")
@click.option(
    "--tokens-per-image",
    default=DEFAULT_TOKENS_PER_IMAGE,
    show_default=True,
    help="Tokens of one image, for traces that only count images.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed for traces that are distributions."
)
@click.option("--num-requests", type=int, help="Stop after this many requests.")
@click.option("--replay", is_flag=True, help="Replay the trace through the real manager, and integrate over time.")
@click.option("--concurrency", default=32, show_default=True, help="With --replay: requests that run at a time.")
@click.option(
    "--max-num-batched-tokens", default=8192, show_default=True, help="With --replay: tokens that one step may process."
)
@click.option(
    "--kv-from-activations",
    is_flag=True,
    help="With --replay: the engine's prefill kernel reads new keys and values from its activations.",
)
@json_option
def command(
    model: str,
    kv_dtype: str,
    tp: int,
    speculative: str | None,
    trace: str | None,
    tokens: int | None,
    text_tokens: int | None,
    image_tokens: int | None,
    policies: tuple[str, ...],
    block_size: int,
    min_block_size: int,
    trace_format: str | None,
    trace_columns: str | None,
    tokens_per_image: int,
    seed: int,
    num_requests: int | None,
    replay: bool,
    concurrency: int,
    max_num_batched_tokens: int,
    kv_from_activations: bool,
    as_json: bool,
) -> None:
    """Show where the KV bytes go, by cause, under each policy.

    Every request is charged what it holds when its last token is computed, alone in its pages. waste = 1 - needed /
    allocated.

    \b
    Examples:
      kvtide waste --model gemma-3-27b --trace demo
      kvtide waste --model llama-3.2-11b-vision --text-tokens 43 --image-tokens 6193
      kvtide waste --model gemma-3-27b --trace demo --replay --concurrency 16 --policy grouped,kvtide
      kvtide waste --model config.json --trace log.csv --trace-columns input=prompt,output=completion
    """
    layout = load_layout(model, kv_dtype, tp, speculative)
    plans = geometries(layout, policies, block_size, min_block_size)
    for name, value in (
        ("--num-requests", num_requests),
        ("--tokens", tokens),
        ("--concurrency", concurrency),
        ("--max-num-batched-tokens", max_num_batched_tokens),
    ):
        require_positive(name, value)
    if trace is None:
        _refuse(ABOUT_TRACES + ABOUT_REPLAYS, "is about a trace; give --trace")
    if not replay:
        _refuse(ABOUT_REPLAYS, "is about a replay; give --replay")
    notes: Sequence[str] = ()
    if trace is None:
        workload: dict[str, Any] = {"tokens": _single_tokens(tokens, text_tokens, image_tokens)}
        report = measure_waste(plans, [_single(tokens, text_tokens, image_tokens)])
    else:
        if not trace.strip():
            raise ConfigError("--trace is empty; give a file, a folder, or the word demo")
        if (tokens, text_tokens, image_tokens) != (None, None, None):
            raise ConfigError(
                "--trace and --tokens, --text-tokens or --image-tokens exclude each other; give one of them"
            )
        stream = open_trace(
            trace,
            format=trace_format,
            columns=_columns(trace_columns),
            tokens_per_image=tokens_per_image,
            seed=seed,
            num_requests=num_requests,
        )
        if replay:
            kept, left_out = replayable(layout, plans)
            results = run_replays(
                kept,
                list(_with_progress(stream)),
                concurrency=concurrency,
                step_tokens=max_num_batched_tokens,
                kv_from_activations=kv_from_activations,
            )
            notes = [*layout.notes, *stream.notes, *left_out]
            if as_json:
                print_json(report_json(layout, stream.name, concurrency, results, notes))
            else:
                print_replay(layout, stream.name, concurrency, results, notes)
            return
        workload = {"trace": stream.name}
        report = measure_waste(plans, _with_progress(stream))
        notes = stream.notes
    if as_json:
        print_json({**_as_json(layout, workload, report), "notes": [*layout.notes, *notes]})
    else:
        _print(layout, str(workload.get("trace", "one request")), report, notes)


def _refuse(options: Sequence[str], reason: str) -> None:
    """`ConfigError` when one of the options stands on the command line: it would be ignored."""
    context = click.get_current_context()
    for name in options:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name.replace('_', '-')} {reason}")


def _single(tokens: int | None, text: int | None, image: int | None) -> Request:
    return Request("0", 0.0, _single_tokens(tokens, text, image), 0, image or 0)


def _single_tokens(tokens: int | None, text: int | None, image: int | None) -> int:
    if (tokens is None) == (text is None and image is None):
        raise ConfigError("give one workload: --trace, --tokens, or --text-tokens and --image-tokens")
    for name, value in (("--text-tokens", text), ("--image-tokens", image)):
        if value is not None and not 0 <= value <= 2**40:
            raise ConfigError(f"{name} {value} must be from 0 to {2**40}")
    total = tokens if tokens is not None else (text or 0) + (image or 0)
    require_positive("the number of tokens", total)
    return total


def _columns(text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    columns = {}
    for part in text.split(","):
        name, separator, column = part.partition("=")
        if not separator or not name.strip() or not column.strip():
            raise ConfigError(
                f"--trace-columns has {part!r}; write NAME=COLUMN pairs such as input=prompt,output=completion"
            )
        columns[name.strip()] = column.strip()
    return columns


def _with_progress(trace: Trace) -> Iterator[Request]:
    """The trace's requests; draws a bar on stderr while they are read, if that is a terminal."""
    err = Console(stderr=True)
    if not err.is_terminal or not trace.num_bytes:
        yield from trace
        return
    columns = (
        TextColumn("reading {task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(trace.name, total=trace.num_bytes)
        for number, request in enumerate(trace):
            if number % 1024 == 0:
                progress.update(task, completed=trace.bytes_read)
            yield request


def _as_json(layout: ModelLayout, workload: dict[str, Any], report: WasteReport) -> dict[str, Any]:
    return {
        "model": layout.name,
        **workload,
        "requests": report.requests,
        "total_tokens": report.tokens,
        "accounting": "final-length",
        "policies": {waste.policy: _policy_json(waste) for waste in report.policies},
    }


def _policy_json(waste: Waste) -> dict[str, Any]:
    return {
        "allocated_bytes": waste.allocated_bytes,
        "needed_bytes": waste.needed_bytes,
        "waste_fraction": waste.waste_fraction,
        "by_cause": waste.by_cause,
        "by_kind": {
            kind: {
                "allocated_bytes": part.allocated_bytes,
                "needed_bytes": part.needed_bytes,
                "waste_fraction": part.waste_fraction,
            }
            for kind, part in waste.by_kind.items()
        },
    }


def _print(layout: ModelLayout, workload: str, report: WasteReport, notes: Sequence[str]) -> None:
    out = console()
    causes = [
        cause
        for cause in report.policies[0].by_cause
        if cause != "needed" and any(waste.by_cause[cause] for waste in report.policies)
    ]
    table = Table(
        title=f"KV memory of {layout.name} on {workload}: {report.requests:,} request{'s'[: report.requests != 1]}, "
        f"{report.tokens:,} tokens, each at its final length",
        title_justify="left",
    )
    for heading in ("policy", "allocated", "needed", "waste", *(cause.replace("_", " ") for cause in causes)):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for waste in report.policies:
        table.add_row(
            waste.policy,
            human_bytes(waste.allocated_bytes),
            human_bytes(waste.needed_bytes),
            f"{waste.waste_fraction:.2%}",
            *(_share(waste.by_cause[cause], waste.allocated_bytes) for cause in causes),
        )
    out.print(table)
    kinds = Table(title="Waste by layer kind", title_justify="left")
    kinds.add_column("policy")
    for kind in report.policies[0].by_kind:
        kinds.add_column(str(kind).replace("_", " "), justify="right")
    for waste in report.policies:
        kinds.add_row(waste.policy, *(f"{part.waste_fraction:.2%}" for part in waste.by_kind.values()))
    out.print(kinds)
    for note in (*layout.notes, *notes):
        out.print(f"note: {note}", style="dim", highlight=False)


def _share(part: int, whole: int) -> str:
    return "–" if not part else f"{part / whole:.2%}"
