"""Where a simulation's report goes: the terminal, a JSON file, an HTML page, or one request's story."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from kvtide.kvcache import ConfigError
from kvtide.kvcache.policies import POLICIES
from kvtide.sims.serving.recording import Story
from kvtide.sims.traces import Request

from .options import console, parse_policies, print_json

Function = TypeVar("Function", bound=Callable[..., Any])

STDOUT = "-"


def report_options(function: Function) -> Function:
    """Options of what is reported; the command receives `explain`, `compare`, `json_file` and `html_file`."""
    options = [
        click.option(
            "--explain",
            multiple=True,
            metavar="REQUEST_ID",
            help="Tell the story of this request instead: queued, admitted, hits, chunks, preempted by whom and why.",
        ),
        click.option(
            "--compare",
            callback=lambda ctx, param, value: parse_policies(ctx, param, value) if value else (),
            metavar="POLICY,...",
            help=f"Also run these memory policies and compare them; there are {', '.join(POLICIES)}.",
        ),
        click.option(
            "--json",
            "json_file",
            is_flag=False,
            flag_value=STDOUT,
            metavar="[FILE]",
            help="Write one JSON object to the file; without one, print it and nothing else.",
        ),
        click.option(
            "--html", "html_file", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with charts."
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def check_outputs(json_file: str | None, html_file: Path | None) -> None:
    """Find out before the work whether its result can be written; `ConfigError` or `MissingExtra` if not."""
    if json_file not in (None, STDOUT):
        assert json_file is not None
        _check_folder(Path(json_file))
    if html_file is not None:
        from kvtide.sims.report.page import check_packages

        _check_folder(html_file)
        check_packages()


def _check_folder(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file to write")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: {path.parent} does not allow it")


def write_whole(path: Path, text: str) -> None:
    """Write a text file that is there whole or not at all."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as temporary:
        try:
            temporary.write(text)
            temporary.close()
            Path(temporary.name).chmod(0o666 & ~_umask())
            Path(temporary.name).replace(path)
        except BaseException:
            Path(temporary.name).unlink(missing_ok=True)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(report: dict[str, Any], json_file: str) -> None:
    """The report as JSON, to a file or to stdout."""
    if json_file == STDOUT:
        print_json(report)
    else:
        write_whole(Path(json_file), json.dumps(report, indent=2, allow_nan=False) + "\n")


def check_followed(explain: Sequence[str], requests: Sequence[Request]) -> None:
    """`ConfigError` for a request that the trace does not have, or that nobody serves."""
    known = {request.request_id for request in requests}
    # As the engine numbers them.
    usable = [request for request in requests if request.input_tokens > 0 and request.output_tokens > 0]
    served = {name for n, request in enumerate(usable) for name in (request.request_id, f"{n}/{request.request_id}")}
    for name in explain:
        if name in served:
            continue
        if name in known:
            raise ConfigError(f"request {name[:80]!r} has no prompt or no output, so it is not served")
        some = ", ".join(repr(request.request_id) for request in requests[:3])
        raise ConfigError(
            f"--explain {name[:80]!r} is no request of the trace; its {len(requests):,} requests are named like {some}"
        )


def print_stories(stories: Sequence[Story]) -> None:
    """Tell the stories of requests, one after another."""
    from rich.table import Table

    from kvtide.sims.report.story import told

    out = console()
    for story in stories:
        table = Table(
            title=f"Request {story.name}: {story.input_tokens:,} prompt tokens, {story.output_tokens:,} output tokens",
            title_justify="left",
            show_header=False,
            box=None,
        )
        table.add_column("when", justify="right", no_wrap=True)
        table.add_column("what")
        for when, what in told(story):
            table.add_row(when, what)
        out.print(table)
