"""`kvtide kernels`: the attention backends of this machine, which are available for a described call, and why not."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from kvtide.kvcache import BackendUnavailable, ConfigError, MissingExtra

from .options import console, json_option, print_json, require_positive

if TYPE_CHECKING:
    from kvtide.kernels.device import Machine
    from kvtide.kernels.registry import Verdict
    from kvtide.kernels.support import Request

FORMATS = ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_ds_mla")
DTYPES = ("bfloat16", "float16", "float32")


@click.command("kernels")
@click.option("--heads", default=128, show_default=True, help="Query heads of one rank.")
@click.option("--q-len", default=1, show_default=True, help="New tokens per request: 1, or 1 + drafts.")
@click.option("--batch", default=32, show_default=True, help="Requests in the batch.")
@click.option("--kv-len", default=8192, show_default=True, help="Tokens that a block table has room for.")
@click.option("--block-size", default=64, show_default=True, help="Tokens per block.")
@click.option("--layers", default=61, show_default=True, help="Layers that share a block; 1 for a cache per layer.")
@click.option("--latent", default="512+64", show_default=True, help="Latent and rope values of a token.")
@click.option("--format", "fmt", type=click.Choice(FORMATS), default=FORMATS[0], show_default=True, help="KV cache.")
@click.option("--dtype", type=click.Choice(DTYPES), default=DTYPES[0], show_default=True, help="Query and output.")
@click.option("--window", type=int, help="Sliding window in tokens, the query's own included.")
@click.option("--sink", is_flag=True, help="The model has an attention sink per head.")
@click.option("--batch-invariant", is_flag=True, help="A row's result may not depend on the other rows.")
@click.option("--finite-unused", is_flag=True, help="The pool holds no NaN even where no token is.")
@click.option("--arch", metavar="9.0|cpu|…", help="Judge for this compute capability instead of this machine's.")
@json_option
def command(
    heads: int,
    q_len: int,
    batch: int,
    kv_len: int,
    block_size: int,
    layers: int,
    latent: str,
    fmt: str,
    dtype: str,
    window: int | None,
    sink: bool,
    batch_invariant: bool,
    finite_unused: bool,
    arch: str | None,
    as_json: bool,
) -> None:
    """Show which MLA attention backends can run a decode call here, which one is picked, and why the others are not.

    Every reason is listed, not only the first. The environment variable KVTIDE_ATTENTION_BACKEND forces a backend.

    \b
    Examples:
      kvtide kernels
      kvtide kernels --heads 16 --q-len 4 --block-size 128 --format fp8_e4m3 --window 4096
      kvtide kernels --arch 10.0 --json
    """
    for name, value in (
        ("--heads", heads),
        ("--q-len", q_len),
        ("--batch", batch),
        ("--kv-len", kv_len),
        ("--block-size", block_size),
        ("--layers", layers),
        ("--window", window),
    ):
        require_positive(name, value)
    parts = re.fullmatch(r"([1-9]\d{0,5})\+(\d{1,5})", latent.replace(" ", ""))
    if parts is None:
        raise ConfigError(f"--latent {latent[:40]!r} must be two sizes such as 512+64")
    try:
        import torch

        from kvtide.kernels import registry
        from kvtide.kernels.device import machine_of, this_machine
        from kvtide.kernels.formats import LatentFormat
        from kvtide.kernels.support import Request
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("kvtide kernels", "torch", "torch") from None
    machine = machine_of(this_machine()) if arch is None else _machine(arch)
    latent_dim, rope_dim = int(parts[1]), int(parts[2])
    token_bytes = LatentFormat(fmt).token_bytes(latent_dim, rope_dim)
    request = Request(
        machine=machine,
        query_dtype=getattr(torch, dtype),
        fmt=LatentFormat(fmt),
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        heads=heads,
        q_len=q_len,
        batch=batch,
        kv_len=kv_len,
        block_size=block_size,
        entries=batch * -(-kv_len // block_size),
        block_stride=layers * block_size * token_bytes,
        token_stride=token_bytes,
        window=window,
        sink=sink,
        varlen=False,
        batch_invariant=batch_invariant,
        capturing=False,
        finite_unused=finite_unused,
    )
    verdicts = registry.explain(request)
    complaint = None
    try:
        picked: str | None = registry.pick(request)
    except BackendUnavailable as error:
        picked, complaint = None, str(error)
    preference = registry.preference(request)
    order = registry.priority(request)
    if as_json:
        print_json(
            {
                "machine": {"kind": machine.kind, "capability": list(machine.capability)},
                "call": _describe(request),
                "picked": picked,
                "complaint": complaint,
                "order": list(order),
                "preference": preference.why if preference else None,
                "backends": {
                    verdict.name: {
                        "available": not verdict.reasons,
                        "reasons": list(verdict.reasons),
                        "by_name_only": verdict.by_name_only,
                    }
                    for verdict in verdicts
                },
            }
        )
        return
    out = console()
    out.print(_table(verdicts, order, picked, f"MLA backends for {machine}"))
    forced = os.environ.get(registry.VARIABLE)
    if forced:
        out.print(f"forced by {registry.VARIABLE}={forced}")
    if preference:
        out.print(f"{preference.first.value} is asked first: {preference.why}")
    out.print(f"picked: {picked}" if picked else f"picked: none, {complaint}")


def _table(verdicts: list[Verdict], order: tuple[str, ...], picked: str | None, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("asked", "backend", "available", "why not"):
        table.add_column(heading, justify="right" if heading == "asked" else "left")
    for verdict in verdicts:
        notes = [*verdict.reasons, *([verdict.by_name_only] if verdict.by_name_only else [])]
        table.add_row(
            str(order.index(verdict.name) + 1) if verdict.name in order else "–",
            verdict.name,
            "no" if verdict.reasons else "picked" if verdict.name == picked else "yes",
            "\n".join(notes),
        )
    return table


def _machine(arch: str) -> Machine:
    from kvtide.kernels.device import Machine

    if arch == "cpu":
        return Machine("cpu")
    parts = re.fullmatch(r"([1-9]\d?)\.(\d)", arch)
    if parts is None:
        raise ConfigError(f"--arch {arch[:40]!r} must be cpu or a compute capability such as 9.0")
    return Machine("cuda", (int(parts[1]), int(parts[2])))


def _describe(request: Request) -> dict[str, Any]:
    return {
        "heads": request.heads,
        "q_len": request.q_len,
        "batch": request.batch,
        "kv_len": request.kv_len,
        "block_size": request.block_size,
        "block_stride": request.block_stride,
        "latent_dim": request.latent_dim,
        "rope_dim": request.rope_dim,
        "format": request.fmt.value,
        "dtype": str(request.query_dtype).removeprefix("torch."),
        "window": request.window,
        "sink": request.sink,
        "batch_invariant": request.batch_invariant,
        "finite_unused": request.finite_unused,
    }
