"""kvtide's public surface: which modules are public, and every name in them, one a line, with its signature.

    python docs/_ext/public_api.py            # print it
    python docs/_ext/public_api.py --write    # announce a change: write it to docs/public-api.txt

The bridges into vLLM and SGLang have one class each, which those name in their configuration and nobody calls.
What `docs/public-api.txt` holds is promised: it changes in a commit that says so, and the changelog tells of it. A
test compares the two. Everything else (other modules, names with an underscore) may change at any time.
"""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

LIST = Path(__file__).resolve().parents[1] / "public-api.txt"
ALL: tuple[str, ...] = ()  # of a module's own names
PACKAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "kvtide.kvcache": {
        "kvtide.kvcache": ALL,
        "kvtide.kvcache.geometry": ALL,
        "kvtide.kvcache.solver": ALL,
        "kvtide.kvcache.policies": ALL,
        "kvtide.kvcache.arena": ALL,
        "kvtide.kvcache.sizes": ALL,
    },
    "kvtide.hma": {"kvtide.hma": ALL, "kvtide.hma.tables": ("GroupTable", "NO_BLOCK")},
    "kvtide.kernels": {
        "kvtide.kernels": ALL,
        "kvtide.kernels.registry": ("Kernel", "VARIABLE", "Verdict", "explain", "pick", "priority", "register"),
        "kvtide.kernels.support": ("Request", "Support"),
        "kvtide.kernels.device": ("Machine", "machine_of", "this_machine"),
    },
    "kvtide.offload": {
        "kvtide.offload.manager": ALL,
        "kvtide.offload.policies": ALL,
        "kvtide.offload.transfers": ("Transfer", "Transfers", "Value"),
        "kvtide.offload.requests": ("Operation", "Requests"),
        "kvtide.offload.store": ALL,
        "kvtide.offload.keys": ALL,
        "kvtide.offload.values": ALL,
        "kvtide.offload.sealing": ALL,
        "kvtide.offload.codecs": ("CODECS", "Codec", "codec_named", "codec_numbered"),
        "kvtide.offload.conformance": ("StoreConformance", "key_of", "value_of"),
    },
    "kvtide.connectors": {
        "kvtide.connectors.config": ALL,
        "kvtide.connectors.registry": ("ENTRY_POINTS", "known_stores", "store_class"),
        "kvtide.connectors.settings": ALL,
        "kvtide.connectors.base": ("BaseConnector",),
        "kvtide.connectors.metrics": ALL,
        "kvtide.connectors.host": ("HostConfig", "HostConnector"),
        "kvtide.connectors.lmdb": ("LMDBConfig", "LMDBConnector"),
        "kvtide.connectors.shared_storage": ("SharedStorageConfig", "SharedStorageConnector"),
        "kvtide.connectors.multi": ("MultiConfig", "MultiConnector"),
        "kvtide.connectors.redis": ("RedisConfig", "RedisConnector"),
        "kvtide.connectors.s3": ("S3Config", "S3Connector"),
        "kvtide.connectors.mooncake": ("MooncakeConfig", "MooncakeConnector"),
        "kvtide.connectors.nixl": ("NixlConfig", "NixlConnector"),
        "kvtide.connectors.nixl_peer": ("NixlPeerConfig", "NixlPeerConnector"),
        "kvtide.connectors.nixl_server": ("PeerServer",),
        "kvtide.connectors.transformers": ALL,
    },
    "kvtide.sims": {
        "kvtide.sims.waste": ALL,
        "kvtide.sims.capacity": ALL,
        "kvtide.sims.replay": ("ReplayWaste", "replay"),
        "kvtide.sims.traces": ALL,
        "kvtide.sims.serving.build": ("Deployment",),
    },
}


CONSTANTS = {
    "kvtide.kvcache.policies": ("POLICIES",),
    "kvtide.offload.policies": ("DEFAULT_RULES",),
    "kvtide.offload.keys": ("CHAIN_BYTES", "KEY_BYTES", "REPLICATED", "SPACE_BYTES"),
    "kvtide.offload.values": ("CODEC_RAW", "HEADER_BYTES", "MAGIC", "VERSION"),
    "kvtide.connectors.config": ("ENV_PREFIX",),
}


def public_modules() -> list[tuple[str, list[str]]]:
    """Every public module and its public names."""
    return [
        (name, list(names) or public_names(import_module(name)))
        for modules in PACKAGES.values()
        for name, names in modules.items()
    ]


def public_names(module: ModuleType) -> list[str]:
    """A module's public names: its `__all__`, or else its own classes and functions, and the listed constants."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = {
        name
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__
    }
    constants = CONSTANTS.get(module.__name__, ())
    return sorted(name for name in own.union(constants) if not name.startswith("_"))


def hidden_bases(kind: type) -> list[type]:
    """Bases within kvtide that are not public themselves, so that what they bring is the class's own."""
    ours = [base for base in kind.__mro__[1:] if base.__module__.startswith("kvtide.")]
    return [base for base in ours if base not in _public_classes()]


def public_members(kind: type) -> dict[str, Any]:
    """A class's public methods and properties, those of hidden bases included."""
    found: dict[str, Any] = {}
    for base in reversed([kind, *hidden_bases(kind)]):
        found |= {name: value for name, value in vars(base).items() if _is_member(name, value)}
    return dict(sorted(found.items()))


def surface() -> list[str]:
    """Every public name, one a line."""
    return [line for module, names in public_modules() for line in _lines(module, names)]


@cache
def _public_classes() -> frozenset[type]:
    values = (getattr(import_module(module), name) for module, names in public_modules() for name in names)
    return frozenset(value for value in values if inspect.isclass(value))


def _lines(module: str, names: list[str]) -> Iterator[str]:
    for name in names:
        value = getattr(import_module(module), name)
        path = f"{module}.{name}"
        if inspect.isclass(value):
            yield from _class_lines(path, value)
        elif callable(value):
            yield f"{path}{_signature(value)}"
        else:
            yield path


def _class_lines(path: str, kind: type) -> Iterator[str]:
    if issubclass(kind, enum.Enum):
        yield path
        yield from (f"{path}.{member} = {kind[member].value!r}" for member in kind.__members__)
    elif issubclass(kind, Exception):
        yield f"{path} < {kind.__mro__[1].__name__}"
    else:
        yield f"{path}{_signature(kind)}"
    for name, value in public_members(kind).items():
        if isinstance(value, property) or not callable(getattr(kind, name)):
            yield f"{path}.{name}"
        else:
            yield f"{path}.{name}{_signature(getattr(kind, name))}"


def _signature(value: Any) -> str:
    """Parameters and defaults; without annotations, which do not change what a call means."""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return ""
    empty = inspect.Parameter.empty
    parameters = [
        parameter.replace(annotation=empty, default=empty if parameter.default is empty else _Shown(parameter.default))
        for name, parameter in signature.parameters.items()
        if name != "self"
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


class _Shown:
    """A default as it is listed: without addresses, which differ from run to run."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        if isinstance(self._value, enum.Enum):
            return f"{type(self._value).__name__}.{self._value.name}"
        text = repr(self._value)
        return "..." if " at 0x" in text or "<" in text else text


def _is_member(name: str, value: Any) -> bool:
    if name.startswith(("_", "test_")):
        return False
    return isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)


if __name__ == "__main__":
    text = "\n".join(surface()) + "\n"
    if sys.argv[1:] == ["--write"]:
        LIST.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
