"""`kvtide completion`: the script that teaches a shell to complete kvtide's commands and options (click's own)."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the completion script for SHELL; the shell reads it when it starts.

    \b
    Examples:
      kvtide completion bash >> ~/.bashrc
      kvtide completion zsh >> ~/.zshrc
      kvtide completion fish > ~/.config/fish/completions/kvtide.fish
    """
    from .main import cli  # not above: main imports this module

    kind = get_completion_class(shell)
    if kind is None:
        raise AssertionError(f"click has no completion for {shell}")
    click.echo(kind(cli, {}, "kvtide", "_KVTIDE_COMPLETE").source())
