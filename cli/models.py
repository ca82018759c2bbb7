"""`kvtide models`: the bundled models."""

from __future__ import annotations

import click
from rich.table import Table

from kvtide.kvcache import ModelLayout, preset_names

from .options import console, human_bytes, json_option, print_json


@click.command("models")
@json_option
def command(as_json: bool) -> None:
    """List the bundled models: their layers, and the bytes of a token and of a request's states.

    \b
    Examples:
      kvtide models
      kvtide models --json
    """
    layouts = {name: ModelLayout.preset(name) for name in preset_names()}
    if as_json:
        print_json(
            {
                "models": {
                    name: {
                        "groups": {group.name: len(group.layers) for group in layout.groups},
                        "bytes_per_token": layout.bytes_per_token,
                        "state_bytes": layout.state_bytes,
                        "max_model_len": layout.max_model_len,
                    }
                    for name, layout in layouts.items()
                }
            }
        )
        return
    table = Table(title=f"{len(layouts)} bundled models (bf16 cache, one rank)", title_justify="left")
    for heading in ("model", "layers that store KV", "bytes/token", "state", "longest"):
        table.add_column(heading, justify="left" if heading in ("model", "layers that store KV") else "right")
    for name, layout in layouts.items():
        table.add_row(
            name,
            " + ".join(f"{len(group.layers)} {group.name}" for group in layout.groups),
            f"{layout.bytes_per_token:,}",
            human_bytes(layout.state_bytes) if layout.state_bytes else "–",
            f"{layout.max_model_len:,}" if layout.max_model_len else "–",
        )
    console().print(table)
