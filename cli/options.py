"""Options that several subcommands share: the model and how it is cut, policies, sizes, and output helpers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from kvtide.kvcache.documents import read_json
from kvtide.kvcache.errors import ConfigError
from kvtide.kvcache.geometry import PageGeometry
from kvtide.kvcache.layout import ModelLayout
from kvtide.kvcache.policies import POLICIES, plan_geometry
from kvtide.kvcache.sizes import parse_bytes
from kvtide.kvcache.solver import MIN_BLOCK_SIZE

MIN_WIDTH = 140

Function = TypeVar("Function", bound=Callable[..., Any])


def parse_size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Option callback: a size such as `80GiB`, `512 MiB`, `80GB` or a plain number of bytes."""
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def parse_policies(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Option callback: comma-separated names of policies."""
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",")))
    for name in names:
        if name not in POLICIES:
            raise click.BadParameter(f"policy {name!r} is not known; allowed: {', '.join(POLICIES)}", ctx, param)
    return names


def model_options(function: Function) -> Function:
    """`--model` and what changes its layout; the command receives one `layout`."""
    options = [
        click.option(
            "--model", required=True, help="A bundled model's name, or a config.json, params.json or YAML file."
        ),
        click.option(
            "--kv-dtype", default="auto", show_default=True, help="KV cache dtype, e.g. bf16, fp8, fp8_ds_mla."
        ),
        click.option(
            "--tp", default=1, show_default=True, help="Tensor-parallel size; all bytes are those of one rank."
        ),
        click.option(
            "--speculative",
            type=click.Choice(["mtp", "eagle"]),
            help="Add draft layers: the model's own MTP modules, or one EAGLE layer shaped like its full attention.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def block_options(function: Function) -> Function:
    """`--block-size` and `--min-block-size`."""
    options = [
        click.option("--block-size", default=16, show_default=True, help="Tokens per block."),
        click.option(
            "--min-block-size",
            default=MIN_BLOCK_SIZE,
            show_default=True,
            help="Smallest block that kvtide may give window groups; set it to what the engine's kernels take.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
policy_option = click.option(
    "--policy",
    "policies",
    callback=parse_policies,
    default=",".join(POLICIES),
    show_default=True,
    help="Policies to compare.",
)


def load_layout(model: str, kv_dtype: str, tp: int, speculative: str | None) -> ModelLayout:
    """The layout that the model options describe. A name with a path's looks, or of an existing path, is a file."""
    require_positive("--tp", tp)
    layout = _read_layout(model)
    if speculative == "mtp":
        layout = layout.with_draft()
    elif speculative == "eagle":
        layout = layout.with_draft([layout.eagle_spec()])
    return layout.with_dtype(kv_dtype).shard(tp)


def _read_layout(model: str) -> ModelLayout:
    if not model.strip():
        raise ConfigError("--model is empty; give a bundled model's name or a file")
    path = Path(model)
    try:
        is_file, is_dir = path.is_file(), path.is_dir()
    except OSError as error:
        raise ConfigError(f"--model {model[:80]!r} cannot be looked at: {error.strerror}") from None
    if path.suffix in {".yaml", ".yml"}:
        return ModelLayout.from_yaml(path)
    if not is_file and path.suffix != ".json":
        try:
            return ModelLayout.preset(model)
        except ConfigError:
            # Then it can only be a path: a folder, or something with folders in front of it.
            if not is_dir and len(path.parts) == 1:
                raise
    if is_dir and not (path / "config.json").exists() and (path / "params.json").exists():
        path = path / "params.json"
    return ModelLayout.from_mistral_params(path) if _is_mistral_params(path) else ModelLayout.from_hf(path)


def _is_mistral_params(path: Path) -> bool:
    if path.is_dir():
        return False
    data = read_json(path, path.name).data
    return path.name == "params.json" or ("n_layers" in data and "num_hidden_layers" not in data)


def geometries(
    layout: ModelLayout, policies: tuple[str, ...], block_size: int, min_block_size: int
) -> list[PageGeometry]:
    """The geometry of every named policy."""
    require_positive("--block-size", block_size)
    require_positive("--min-block-size", min_block_size)
    return [plan_geometry(policy, layout, block_size, min_block_size=min_block_size) for policy in policies]


def require_positive(name: str, value: int | None) -> None:
    """`ConfigError` unless an optional token count is absent or at least 1."""
    if value is not None and not 1 <= value <= 2**40:
        raise ConfigError(f"{name} {str(value)[:40]} must be from 1 to {2**40}")


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def human_bytes(count: float) -> str:
    """Bytes for people: 3 significant digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(count) < 1000 or unit == "PiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:#.3g}".rstrip(".") + f" {unit}"
        count /= 1024
    raise AssertionError


def console() -> Console:
    """Where tables go: stdout, wide enough that no figure is cut; a narrow terminal wraps the lines itself.

    Names come from users' files, so nothing in them is markup.
    """
    width = max(Console().width, MIN_WIDTH)
    return Console(width=width, markup=False, emoji=False, highlight=False)
