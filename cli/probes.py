"""What `kvtide doctor` tries, each probe in a process of its own: a library that crashes or hangs is a finding.

A probe returns one line about what works, or raises a `KvtideError` that says why it does not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from kvtide.connectors.config import load_config, make_store, open_store
from kvtide.kvcache import KvtideError
from kvtide.offload.keys import KEY_BYTES
from kvtide.offload.store import Status, Store

TIMEOUT_S = 60.0
VALUE_BYTES = 64 << 10
NIXL_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
NIXL = {
    "NixlConnector POSIX": "POSIX",
    "NixlConnector GDS": "GDS",
    "NixlConnector GDS_MT": "GDS_MT",
    "NixlConnector OBJ": "OBJ",
    "NixlPeerConnector": "UCX",
}
_ANSWER = "kvtide-probe: "


class Finding(NamedTuple):
    """What a probe found: whether the part works here, and what there is to say."""

    name: str
    works: bool
    text: str


def round_trip(store: Store) -> str:
    """Store a value, read it back, and delete it again."""
    key, value = b"kvtide doctor".ljust(KEY_BYTES, b"."), bytes(range(256)) * (VALUE_BYTES // 256)
    buffer = bytearray(VALUE_BYTES)
    calls: tuple[tuple[str, Callable[[], list[Status]], tuple[Status, ...]], ...] = (
        ("put", lambda: store.put([key], [value]), (Status.STORED, Status.PRESENT)),
        ("read", lambda: store.get_into([key], [buffer]), (Status.HIT,)),
        ("deleted", lambda: store.delete([key]), (Status.DELETED,)),
    )
    for what, call, allowed in calls:
        (status,) = call()
        if status not in allowed:
            faults = ", ".join(store.stats().faults)
            raise KvtideError(f"a value was not {what}: {status.name}{f' ({faults})' if faults else ''}")
    if buffer != value:
        raise KvtideError("a value came back changed")
    return "a value went in and came back"


def _in_a_folder(name: str, **settings: Any) -> Callable[[], str]:
    def probe() -> str:
        with tempfile.TemporaryDirectory(prefix="kvtide-doctor-") as folder:
            filled = {key: folder if value is Path else value for key, value in settings.items()}
            with make_store(name, filled) as store:
                return round_trip(store)

    return probe


def _nixl(plugin: str, package: str) -> Callable[[], str]:
    def probe() -> str:
        from kvtide.connectors.nixl_agent import Agent

        if plugin in ("UCX", "OBJ"):
            parameters = {"bucket": "kvtide-doctor", "region": "none"} if plugin == "OBJ" else {}
            Agent(plugin, parameters, "DRAM" if plugin == "UCX" else "OBJ", package).close()
            return f"the plug-in of {package} can be created"
        with tempfile.TemporaryDirectory(prefix="kvtide-doctor-") as folder:
            settings = {"plugin": plugin, "path": folder, "package": package, "lane_bytes": "1MiB", "lanes": 1}
            with make_store("NixlConnector", settings) as store:
                return f"{round_trip(store)}, through {package}"

    return probe


def _library(load: Callable[[], object], server: str) -> Callable[[], str]:
    def probe() -> str:
        load()
        return f"the library is here; {server} is tried with: kvtide doctor CONFIG"

    return probe


def _redis() -> object:
    from kvtide.connectors.redis import _package

    return _package()


def _s3() -> object:
    from kvtide.connectors.s3 import _package

    return _package("botocore.exceptions")


def _mooncake() -> object:
    from kvtide.connectors.mooncake import _library

    return _library()


PROBES: Mapping[str, Callable[[], str]] = {
    "HostConnector": _in_a_folder("HostConnector", max_bytes="1MiB"),
    "LMDBConnector": _in_a_folder("LMDBConnector", path=Path, max_bytes="16MiB"),
    "SharedStorageConnector": _in_a_folder("SharedStorageConnector", shared_storage_path=Path),
    **{f"{name} {package}": _nixl(plugin, package) for name, plugin in NIXL.items() for package in NIXL_PACKAGES},
    "RedisConnector": _library(_redis, "a server"),
    "S3Connector": _library(_s3, "a service"),
    "MooncakeConnector": _library(_mooncake, "a master"),
}
# Without these nothing works; they need nothing but kvtide itself.
ESSENTIAL = ("HostConnector", "LMDBConnector", "SharedStorageConnector")
STORES = (*ESSENTIAL, *NIXL, "RedisConnector", "S3Connector", "MooncakeConnector")


def configured(config: str) -> str:
    """A round trip through the store that a configuration names."""
    with open_store(load_config(config)) as store:
        return round_trip(store)


def try_store(name: str, config: str | None = None) -> Finding:
    """Try one of `STORES`; those of NIXL with each of its builds that is installed, until one works."""
    if name not in NIXL:
        return run_probe(name, config)
    found = Finding(name, False, "NIXL is not installed; install it with: pip install 'kvtide[nixl]'")
    texts = []
    for package in NIXL_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            metadata.version(package)
            found = run_probe(f"{name} {package}")
            if found.works:
                return found._replace(name=name)
            texts.append(f"{package}: {found.text}")
    return found._replace(name=name, text="; ".join(dict.fromkeys(texts)) or found.text)


def run_probe(name: str, config: str | None = None) -> Finding:
    """One of `PROBES`, or with a `config` a round trip through it, in a process of its own."""
    code = "import sys; from kvtide.cli.probes import answer; answer(*sys.argv[1:])"
    arguments = [sys.executable, "-c", code, name, *([] if config is None else [config])]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name, False, f"no answer within {TIMEOUT_S:.0f} seconds")
    for line in done.stdout.splitlines():
        if line.startswith(_ANSWER):
            works, text = json.loads(line.removeprefix(_ANSWER))
            return Finding(name, works, text.partition("; see the messages of NIXL")[0])
    reason = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    last = done.stderr.strip().splitlines()[-1:] or [""]
    return Finding(name, False, f"the process ended with {reason} {last[0]}".strip())


def answer(name: str, config: str | None = None) -> None:
    """In that process: run the probe and print the answer on a line of its own."""
    try:
        found = [True, PROBES[name]() if config is None else configured(config)]
    except KvtideError as error:
        found = [False, " ".join(str(error).split())]
    except Exception as error:  # what a library raises on a machine that lacks something
        found = [False, f"{type(error).__name__}: {' '.join(str(error).split())}"]
    print(f"\n{_ANSWER}{json.dumps(found)}", flush=True)
