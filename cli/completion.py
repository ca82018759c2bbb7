"""`kvtide completion`: the script that lets a shell complete kvtide's commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print what makes SHELL complete kvtide's commands and options.

    \b
    Examples:
      echo 'eval "$(kvtide completion bash)"' >> ~/.bashrc
      echo 'eval "$(kvtide completion zsh)"' >> ~/.zshrc
      kvtide completion fish > ~/.config/fish/completions/kvtide.fish
    """
    from .main import cli

    script = get_completion_class(shell)
    assert script is not None
    # Not `source()`, which asks bash for its version first, on a machine that may have none.
    completion = script(cli, {}, "kvtide", "_KVTIDE_COMPLETE")
    click.echo(completion.source_template % completion.source_vars())
