"""`kvtide layout`: what kvtide understood of a model, and how each policy would cut its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from rich.table import Table

from kvtide.kvcache.geometry import PageGeometry
from kvtide.kvcache.layout import ModelLayout

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
)


@click.command("layout")
@model_options
@policy_option
@block_options
@json_option
def command(
    model: str,
    kv_dtype: str,
    tp: int,
    speculative: str | None,
    policies: tuple[str, ...],
    block_size: int,
    min_block_size: int,
    as_json: bool,
) -> None:
    """Show a model's layers and groups, their bytes, where each field came from, and each policy's pages.

    \b
    Examples:
      kvtide layout --model gemma-3-27b
      kvtide layout --model path/to/config.json --kv-dtype fp8 --tp 4
    """
    layout = load_layout(model, kv_dtype, tp, speculative)
    plans = geometries(layout, policies, block_size, min_block_size)
    if as_json:
        print_json(_as_json(layout, plans))
    else:
        _print(layout, plans)


def _as_json(layout: ModelLayout, plans: Sequence[PageGeometry]) -> dict[str, Any]:
    return {
        "model": layout.name,
        "max_model_len": layout.max_model_len,
        "tp_size": layout.tp_size,
        "bytes_per_token": layout.bytes_per_token,
        "state_bytes": layout.state_bytes,
        "groups": [
            {
                "name": group.name,
                "kind": group.spec.kind,
                "spec": group.spec.label,
                "layers": list(group.layers),
                "bytes_per_token_per_layer": group.spec.bytes_per_token,
                "bytes_per_token": group.bytes_per_token,
                "state_bytes": group.state_bytes,
            }
            for group in layout.groups
        ],
        "layers": [
            {
                "index": layer.index,
                "kind": layer.spec.kind if layer.spec else None,
                "shares": layer.shares,
                "draft": layer.draft,
            }
            for layer in layout.layers
        ],
        "geometry": {plan.policy: _geometry_json(plan) for plan in plans},
        "sources": [source._asdict() for source in layout.sources],
        "notes": list(layout.notes),
    }


def _geometry_json(plan: PageGeometry) -> dict[str, Any]:
    return {
        "page_bytes": plan.page_bytes,
        "unit": plan.unit,
        "num_tables": plan.num_tables,
        "max_arena_bytes": plan.max_arena_bytes,
        "slack_bytes": plan.slack_bytes,
        "pinned_fraction": plan.pinned_fraction,
        "groups": {
            fmt.group.name: {
                "block_size": fmt.block_size,
                "tables": fmt.tables,
                "block_bytes": fmt.block_bytes,
                "blocks_per_page": fmt.blocks_per_page,
                "page_tail_bytes": fmt.page_tail_bytes,
                "padding_layers": fmt.padding_layers,
            }
            for fmt in plan.formats
        },
    }


def _print(layout: ModelLayout, plans: Sequence[PageGeometry]) -> None:
    out = console()
    limit = f", up to {layout.max_model_len:,} tokens" if layout.max_model_len else ""
    state = f", {human_bytes(layout.state_bytes)} of state a request" if layout.state_bytes else ""
    rank = f" on each of {layout.tp_size} ranks" if layout.tp_size > 1 else ""
    out.print(
        f"{layout.name}: {layout.bytes_per_token:,} bytes a token in all layers{state}{rank}{limit}", highlight=False
    )

    groups = Table(title="Groups", title_justify="left")
    for heading in (
        "group",
        "layers",
        "each layer stores",
        "bytes/token/layer",
        "bytes/token",
        "state",
        "layer numbers",
    ):
        groups.add_column(heading, justify="right" if "bytes" in heading or heading == "state" else "left")
    for group in layout.groups:
        groups.add_row(
            group.name,
            str(len(group.layers)),
            group.spec.label,
            f"{group.spec.bytes_per_token:,}" if group.spec.bytes_per_token else "–",
            f"{group.bytes_per_token:,}" if group.bytes_per_token else "–",
            human_bytes(group.state_bytes) if group.state_bytes else "–",
            _ranges(group.layers),
        )
    out.print(groups)
    silent = [layer for layer in layout.layers if layer.spec is None]
    if silent:
        out.print(f"{len(silent)} layers store nothing of their own: {_ranges([layer.index for layer in silent])}")

    pages = Table(title="Pages under each policy", title_justify="left")
    for heading in (
        "policy",
        "page",
        "unit",
        "tables",
        "group",
        "block",
        "tokens",
        "blocks/page",
        "tail",
        "padding layers",
    ):
        pages.add_column(heading, justify="left" if heading in ("policy", "group") else "right")
    for plan in plans:
        for fmt in plan.formats:
            first = fmt is plan.formats[0]
            pages.add_row(
                plan.policy if first else "",
                human_bytes(plan.page_bytes) if first else "",
                human_bytes(plan.unit) if first else "",
                str(plan.num_tables) if first and plan.one_table else ("" if plan.one_table else str(fmt.tables)),
                fmt.group.name,
                human_bytes(fmt.block_bytes),
                str(fmt.block_size) if fmt.block_size else "state",
                str(fmt.blocks_per_page),
                human_bytes(fmt.page_tail_bytes) if fmt.page_tail_bytes else "–",
                str(fmt.padding_layers) if fmt.padding_layers else "–",
            )
    out.print(pages)

    if layout.sources:
        sources = Table(title="Where each field came from", title_justify="left")
        for heading in ("field", "value", "origin"):
            sources.add_column(heading)
        for source in layout.sources:
            sources.add_row(*source)
        out.print(sources)
    for note in layout.notes:
        out.print(f"note: {note}", style="dim", highlight=False)


def _ranges(numbers: Sequence[int]) -> str:
    """`0-4, 6-10` for sorted numbers."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
