"""The command `kvtide`: its subcommands, and how errors leave it.

Each subcommand lives in a module of its own that is imported when it runs, so that `kvtide --help` stays fast. Whatever
goes wrong on purpose (`KvtideError`, bad arguments) is one sentence on stderr and exit code 2.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from importlib import import_module, metadata

import click

COMMANDS = {
    "demo": "Show what kvtide does, on a bundled model and trace.",
    "waste": "Show where the KV bytes of a workload go, by cause, under each policy.",
    "layout": "Show a model's layers and groups, their bytes, and where each field came from.",
    "plan": "Show how many requests and how long a context fit in a memory budget.",
    "simulate": "Serve a trace in virtual time: latency, throughput and memory under an engine's flags.",
    "sweep": "Simulate every combination of some flags' values, in parallel, and compare them.",
    "calibrate": "Fit the simulator's cost model to a recorded run, and say how far off it is.",
    "models": "List the bundled models.",
    "kernels": "Show which attention backends can run here, which is picked, and why the others are not.",
    "store": "Look into a configured store, check it, clean it, measure it.",
    "config": "Check a connector configuration, or print its JSON schema.",
    "doctor": "Show what is installed, and which stores and kernels would work here, or why not.",
    "completion": "Print the script that lets bash, zsh or fish complete kvtide's commands.",
}


class LazyGroup(click.Group):
    """Imports `kvtide.cli.<name>` when a subcommand is used; help texts need no import."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"kvtide.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(metadata.version("kvtide"), prog_name="kvtide")
def cli() -> None:
    """Plan and inspect the KV-cache memory of large language models.

    \b
    Examples:
      kvtide demo
      kvtide doctor
      kvtide waste --model path/to/config.json --trace requests.jsonl
      kvtide plan --model gpt-oss-120b --memory 80GiB --tokens 131072
    """


def run() -> None:
    """The console script: one sentence and exit code 2 for every error that has a cause outside the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no × gets a ?, not a traceback
    try:
        cli.main(standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as help_text:
        click.echo(help_text.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, less) has gone; that is no failure, but Python would complain when it flushes at exit.
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        # Such as a full disk behind stdout. What is left in its buffer cannot be written at exit either.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"cannot write or read: {error.strerror or error}")
    except MemoryError:
        _fail("not enough memory for this; ask for less")
    except Exception as error:
        from kvtide.kvcache.errors import KvtideError  # not above: it brings numpy, and --help needs none

        if not isinstance(error, KvtideError):
            raise
        _fail(str(error))


def _fail(message: str) -> None:
    click.echo(f"kvtide: {' '.join(message.split())}", err=True)
    sys.exit(2)
