"""`kvtide doctor`: what is installed, and which stores, codecs, kernels and bridges work here, by trying them.

What is tried, and how, is in `probes`. Parts of the base install have to work; of the others it is only said why not,
unless they are named as arguments.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, NamedTuple

import click

from kvtide.kvcache.errors import ConfigError

from .options import json_option, print_json

TIMEOUT_S = 120  # a cold import of torch on a slow disk, and a kernel's compilation


class Part(NamedTuple):
    """What one probe tries. Where a `required` part does not work, something is wrong."""

    name: str
    kind: str
    probe: str
    required: bool = False


PARTS = (
    Part("HostConnector", "store", "host", required=True),
    Part("LMDBConnector", "store", "lmdb", required=True),
    Part("SharedStorageConnector", "store", "shared_storage", required=True),
    Part("MultiConnector", "store", "multi", required=True),
    Part("NixlConnector/POSIX", "store", "nixl_posix"),
    Part("NixlConnector/GDS", "store", "nixl_gds"),
    Part("NixlConnector/OBJ", "store", "nixl_obj"),
    Part("NixlConnector/OBJ/nixl_cu12", "store", "nixl_obj_cu12"),
    Part("NixlPeerConnector", "store", "nixl_peer"),
    Part("RedisConnector", "store", "redis"),
    Part("S3Connector", "store", "s3"),
    Part("MooncakeConnector", "store", "mooncake"),
    Part("zstd", "codec", "zstd"),
    Part("lz4", "codec", "lz4"),
    Part("GPU", "device", "gpu"),
    Part("kernels", "kernel", "kernels"),
    Part("vLLM", "engine", "vllm"),
    Part("SGLang", "engine", "sglang"),
    Part("transformers", "engine", "transformers"),
)
PACKAGES = (
    "numpy",
    "lmdb",
    "msgspec",
    "xxhash",
    "torch",
    "triton",
    "nixl",
    "redis",
    "boto3",
    "mooncake-transfer-engine-non-cuda",
    "zstandard",
    "lz4",
    "prometheus-client",
    "vllm",
    "sglang",
    "transformers",
)


class Finding(NamedTuple):
    """What is known of one part; `log` is the end of what its libraries wrote."""

    name: str
    kind: str
    required: bool
    works: bool
    note: str
    log: str


@click.command("doctor")
@click.argument("names", nargs=-1)
@json_option
def command(names: tuple[str, ...], as_json: bool) -> None:
    """Show what is installed, and which stores, codecs, kernels and bridges work here, or why not.

    Each one is really tried: stores keep a value in a temporary directory, NIXL's plug-ins are created, kernels compute
    a small call beside the reference. Exit code 1 if a part of the base install does not work, or, with NAMES (such as
    RedisConnector, or all of the kind store, codec, device, kernel or engine), if one of those does not.

    \b
    Examples:
      kvtide doctor
      kvtide doctor LMDBConnector codec
      kvtide doctor kernel --json
    """
    parts = _chosen(names)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        found = list(pool.map(_try, parts))
    # Of several kernels one is enough.
    healthy = all(any(finding.works for finding in group) for group in found if group[0].required)
    findings = [finding for group in found for finding in group]
    versions = {name: _version(name) for name in PACKAGES}
    if as_json:
        print_json(
            {
                "healthy": healthy,
                "kvtide": metadata.version("kvtide"),
                "python": platform.python_version(),
                "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
                "packages": versions,
                "parts": [finding._asdict() for finding in findings],
            }
        )
    else:
        _print(versions, findings)
    if not healthy:
        raise SystemExit(1)


def _chosen(names: Sequence[str]) -> list[Part]:
    if not names:
        return list(PARTS)
    chosen: list[Part] = []
    for name in names:
        found = [part for part in PARTS if name.lower() in (part.name.lower(), part.kind)]
        if not found:
            kinds = ", ".join(dict.fromkeys(part.kind for part in PARTS))
            raise ConfigError(
                f"{name[:40]!r} is not known; allowed are {', '.join(part.name for part in PARTS)}, "
                f"and all of a kind: {kinds}"
            )
        chosen += [part._replace(required=True) for part in found]
    return list(dict.fromkeys(chosen))


def _try(part: Part) -> list[Finding]:
    """Run a part's probe in a process of its own."""
    command = [sys.executable, "-m", f"{__package__}.probes", part.probe]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return [Finding(part.name, part.kind, part.required, False, f"no answer within {TIMEOUT_S} seconds", "")]
    log = "\n".join(done.stderr.strip().splitlines()[-5:])
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        why = f"its process ends with code {done.returncode}: {log.splitlines()[-1] if log else 'no message'}"
        return [Finding(part.name, part.kind, part.required, False, why, log)]
    answers = {part.name: answer} if "works" in answer else answer
    return [Finding(name, part.kind, part.required, a["works"], a["note"], log) for name, a in answers.items()]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _print(versions: dict[str, str | None], findings: Sequence[Finding]) -> None:
    system = f"{platform.system()} {platform.machine()}"
    click.echo(f"kvtide {metadata.version('kvtide')}, Python {platform.python_version()}, {system}")
    click.echo("installed: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    absent = ", ".join(name for name, version in versions.items() if version is None)
    if absent:
        click.echo(f"not installed: {absent}")
    width = max(len(finding.name) for finding in findings)
    for kind in dict.fromkeys(finding.kind for finding in findings):
        click.echo(f"\n{kind}s")
        for finding in findings:
            if finding.kind == kind:
                word = "works" if finding.works else "no"
                click.echo(f"  {finding.name:{width}}  {word:6}  {finding.note}".rstrip())
