"""`kvtide store`: look into a configured store, check it, clean it, and measure it.

Every subcommand takes the configuration that the engine reads. Those that only look open a store read-only where it can
be opened so; then they work beside a running engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvtide.connectors.config import TransferConfig, load_config, make_store, store_settings
from kvtide.connectors.multi import MultiConfig
from kvtide.connectors.settings import secret
from kvtide.kvcache import ConfigError
from kvtide.kvcache.sizes import parse_bytes
from kvtide.offload.keys import KEY_BYTES, SPACE_BYTES, StoreKey
from kvtide.offload.store import Entry, Status, Store
from kvtide.offload.values import Header

from .options import console, human_bytes, json_option, parse_size, print_json
from .store_bench import bench_store
from .store_serve import serve_store

BATCH = 64

Function = TypeVar("Function", bound=Callable[..., Any])


@click.group(name="store")
def command() -> None:
    """Look into a store, check every value in it, clean it, and measure it.

    CONFIG is a connector configuration: a JSON or YAML file, or JSON text.

    \b
    Examples:
      kvtide store stat kv.yaml
      kvtide store verify kv.yaml
      kvtide store bench kv.yaml --size 256KiB
    """


config_argument = click.argument("config")


@command.command()
@config_argument
@json_option
def stat(config: str, as_json: bool) -> None:
    """Show how many values and bytes a store holds, of how many it may.

    \b
    Examples:
      kvtide store stat kv.yaml
      kvtide store stat kv.yaml --json
    """
    with opened(config, looks=True) as (name, store):
        rows = [(label, tier.stats()) for label, tier in _tiers(name, store)]
    if as_json:
        print_json(
            [
                {
                    "store": label,
                    "num_values": stats.num_values,
                    "num_bytes": stats.num_bytes,
                    "capacity_bytes": stats.capacity_bytes,
                    "faults": dict(stats.faults),
                }
                for label, stats in rows
            ]
        )
        return
    table = Table("store", "values", "bytes", "capacity", "used")
    for label, stats in rows:
        capacity = stats.capacity_bytes
        table.add_row(
            label,
            f"{stats.num_values:,}",
            human_bytes(stats.num_bytes),
            "not bounded" if capacity is None else human_bytes(capacity),
            "" if not capacity else f"{stats.num_bytes / capacity:.1%}",
        )
    console().print(table)


@command.command(name="ls")
@config_argument
@click.option("--limit", type=click.IntRange(min=1), help="Stop after this many values.")
@click.option("--space", help="Only values whose space digest (the first 16 bytes of a key, in hex) begins so.")
@json_option
def list_values(config: str, limit: int | None, space: str | None, as_json: bool) -> None:
    """List the values: key, bytes on the tier, space.

    \b
    Examples:
      kvtide store ls kv.yaml --limit 10
      kvtide store ls kv.yaml --space 00 --json
    """
    prefix = _hex(space or "", "--space", SPACE_BYTES)
    with opened(config, looks=True) as (_, store):
        found = (entry for entry in store.scan() if entry.key.hex().startswith(prefix))
        for entry in islice(found, limit):
            if as_json:  # one object a line, since there may be millions
                click.echo(json.dumps({"key": entry.key.hex(), "num_bytes": entry.num_bytes}))
            else:
                click.echo(f"{entry.key.hex()}  {entry.num_bytes}")


@command.command()
@config_argument
@json_option
def verify(config: str, as_json: bool) -> None:
    """Read every value and check its header and checksum; corrupt ones are removed. Exit code 1 if there were any.

    \b
    Examples:
      kvtide store verify kv.yaml
      kvtide store verify kv.yaml --json
    """
    counts = dict.fromkeys(Status, 0)
    bad: list[str] = []
    with opened(config) as (_, store), _progress(as_json) as bar:
        task = bar.add_task("verifying", total=store.stats().num_values)
        for keys in _batches(store.scan()):
            for key, status in zip(keys, store.verify(keys), strict=True):
                counts[status] += 1
                if status in (Status.CORRUPT, Status.ERROR):
                    bad.append(key.hex())
            bar.advance(task, len(keys))
    intact, corrupt, unread = counts[Status.HIT], counts[Status.CORRUPT], counts[Status.ERROR]
    if as_json:
        print_json({"intact": intact, "corrupt": corrupt, "unreadable": unread, "bad_keys": bad})
    else:
        click.echo(f"{intact:,} values are intact, {corrupt:,} were corrupt and are gone, {unread:,} cannot be read.")
        for digits in bad[:20]:
            click.echo(f"  {digits}")
    if corrupt or unread:
        raise SystemExit(1)


@command.command()
@config_argument
@json_option
def gc(config: str, as_json: bool) -> None:
    """Give back what serves no value: leftovers of dead writers, expired values, sparse files.

    \b
    Examples:
      kvtide store gc kv.yaml
    """
    with opened(config) as (_, store):
        reclaimed = store.gc()
    if as_json:
        print_json({"reclaimed_bytes": reclaimed})
    else:
        click.echo(f"{human_bytes(reclaimed)} given back.")


@command.command()
@config_argument
@click.argument("key")
@json_option
def explain(config: str, key: str, as_json: bool) -> None:
    """Say, tier by tier, what is known of KEY (64 hex digits): there or not, its header, whether it is intact.

    \b
    Examples:
      kvtide store explain kv.yaml 0000000000000000000000000000000000000000000000000000000000000000
      kvtide store explain kv.yaml $(kvtide store ls kv.yaml --limit 1 | cut -c1-64)
    """
    digits = _hex(key, "KEY", KEY_BYTES)
    if len(digits) != 2 * KEY_BYTES:
        raise ConfigError(f"KEY {key!r} has {len(digits)} hex digits; a key has {2 * KEY_BYTES}")
    wanted = bytes.fromhex(digits)
    with opened(config, looks=True) as (name, store):
        answers = [_explain(label, tier, wanted) for label, tier in _tiers(name, store)]
        if all(answer["status"] == "miss" for answer in answers):
            near = sum(entry.key[:SPACE_BYTES] == wanted[:SPACE_BYTES] for entry in store.scan())
            answers.append({"store": "all", "values_of_the_same_space": near})
    if as_json:
        print_json(answers)
        return
    for answer in answers:
        if "values_of_the_same_space" in answer:
            near = answer["values_of_the_same_space"]
            click.echo(
                f"{near:,} values of the same space are there: "
                + ("the tokens (or salt, adapter, images) differ." if near else "model, dtype, layers or block differ.")
            )
            continue
        click.echo(f"{answer['store']}: {answer['status']}")
        for field in ("raw_bytes", "stored_bytes", "codec", "generation"):
            if field in answer:
                click.echo(f"  {field}: {answer[field]:,}")


def _explain(label: str, store: Store, key: StoreKey) -> dict[str, Any]:
    header: Header | None = store.headers([key])[0]
    answer: dict[str, Any] = {"store": label, "status": store.verify([key])[0].name.lower()}
    if answer["status"] == "hit":
        answer["status"] = "intact"
    if header is not None:
        answer |= {field: getattr(header, field) for field in ("raw_bytes", "stored_bytes", "codec", "generation")}
    return answer


@command.command()
@config_argument
@click.option("--size", "sizes", multiple=True, default=("256KiB", "4MiB"), show_default=True, help="Bytes of a value.")
@click.option("--total", default="256MiB", show_default=True, callback=parse_size, help="Bytes to move for each size.")
@click.option("--batch", default=16, show_default=True, type=click.IntRange(1, 4096), help="Values of one call.")
@json_option
def bench(config: str, sizes: tuple[str, ...], total: int, batch: int, as_json: bool) -> None:
    """Measure a store: put, look up, get. Writes values of its own, and deletes them afterwards.

    \b
    Examples:
      kvtide store bench kv.yaml
      kvtide store bench kv.yaml --size 64KiB --size 1MiB --total 32MiB --batch 8
    """
    with opened(config) as (_, store), _progress(as_json) as bar:
        task = bar.add_task("measuring", total=len(sizes))
        results = []
        for size in sizes:
            results.append(bench_store(store, value_bytes=parse_bytes(size), total_bytes=total, batch=batch))
            bar.advance(task)
    if as_json:
        print_json(results)
        return
    table = Table("value", "operation", "values", "MB/s", "values/s", "p50 ms", "p99 ms", "not served")
    for result in results:
        for row in result["operations"]:
            table.add_row(
                human_bytes(result["value_bytes"]),
                row["operation"],
                f"{row['values']:,}",
                "–" if row["megabytes_per_second"] is None else f"{row['megabytes_per_second']:,.0f}",
                f"{row['values_per_second']:,.0f}",
                f"{row['p50_ms']:.2f}",
                f"{row['p99_ms']:.2f}",
                f"{row['not_served']:,}",
            )
    console().print(table)
    if any(row["not_served"] for result in results for row in result["operations"]):
        note = "not served is what the store did not take, or had evicted again: give it room for --total"
        console().print(f"note: {note}", style="dim", highlight=False)


@contextmanager
def opened(source: str, *, looks: bool = False) -> Iterator[tuple[str, Store]]:
    """The configured store, open; read-only, if it can be, for commands that only look."""
    config = load_config(source)
    store = make_store(config.kv_connector, _settings(config, looks), config.kv_connector_module_path)
    with store:
        yield config.kv_connector, store


def _settings(config: TransferConfig, looks: bool) -> dict[str, Any]:
    """The store's settings; for a look, read-only wherever a store or a stack's tier can be, on a copy."""
    extra = config.kv_connector_extra_config
    return _read_only(config.kv_connector, extra, config.kv_connector_module_path) if looks else extra


def _read_only(name: str, extra: dict[str, Any], module_path: str | None) -> dict[str, Any]:
    settings = store_settings(name, extra, module_path)
    looking = {**extra, "read_only": True} if "read_only" in settings.__struct_fields__ else dict(extra)
    if isinstance(settings, MultiConfig):
        looking["connectors"] = [
            {
                **given,
                "kv_connector_extra_config": _read_only(
                    tier.kv_connector, tier.kv_connector_extra_config, tier.kv_connector_module_path
                ),
            }
            for given, tier in zip(extra["connectors"], settings.connectors, strict=True)
        ]
    return looking


def _tiers(name: str, store: Store) -> list[tuple[str, Store]]:
    tiers = [(f"{name}[{at}] {tier.name}", tier) for at, tier in enumerate(store.tiers)]
    return tiers or [(name, store)]


def _batches(entries: Iterator[Entry]) -> Iterator[Sequence[StoreKey]]:
    while keys := [entry.key for entry in islice(entries, BATCH)]:
        yield keys


@command.command()
@config_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to serve on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port; a free one by default.")
@click.option("--connections", type=click.IntRange(1, 1024), default=8, show_default=True, help="Readers at a time.")
@click.option("--share", callback=parse_size, default="64MiB", show_default=True, help="Memory of each reader.")
@click.option("--secret-env", help="Environment variable that holds the secret which readers must have.")
@click.option("--secret-file", help="File that holds the secret, and nothing else.")
@click.option("--package", default="nixl", show_default=True, help="NIXL's build: nixl, nixl_cu12 or nixl_cu13.")
def serve(
    config: str,
    host: str,
    port: int,
    connections: int,
    share: int,
    secret_env: str | None,
    secret_file: str | None,
    package: str,
) -> None:
    """Let other engines read a store (as their NixlPeerConnector), until SIGINT or SIGTERM.

    Any address but this machine's own needs a secret of at least 16 characters.

    \b
    Examples:
      KV_SECRET=... kvtide store serve kv.yaml --host 10.0.0.5 --port 7070 --secret-env KV_SECRET
    """
    key = secret("secret", secret_env, secret_file)
    with opened(config, looks=True) as (_, store):
        serve_store(
            store, host=host, port=port, connections=connections, share_bytes=share, package=package, secret=key
        )


def _hex(text: str, what: str, most: int) -> str:
    digits = text.lower()
    if len(digits) > 2 * most or set(digits) - set("0123456789abcdef"):
        raise ConfigError(f"{what} {text!r} must be at most {2 * most} hex digits")
    return digits


def _progress(hidden: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console(), transient=True, disable=hidden or not console().is_terminal)
