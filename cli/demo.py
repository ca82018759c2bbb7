"""`kvtide demo`: the shortest way to see what kvtide does, with nothing but the installed package."""

from __future__ import annotations

import click

from .waste import command as waste

MODEL = "gemma-3-27b"


@click.command("demo")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Show where a bundled model's memory goes on a bundled trace, under each policy.

    It is `kvtide waste --model gemma-3-27b --trace demo`, which takes your own model and trace, and options.

    \b
    Examples:
      kvtide demo
      kvtide waste --help
    """
    with waste.make_context("waste", ["--model", MODEL, "--trace", "demo"], parent=ctx) as inner:
        waste.invoke(inner)
    click.echo("\nThe same for your own: kvtide waste --model path/to/config.json --trace requests.jsonl")
