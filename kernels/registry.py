"""Which kernel answers a call: the backends, what each supports, and the order in which they are asked.

    select(call)(call)     the argument names a backend, else KVTIDE_ATTENTION_BACKEND does, else the first of
                           `priority` that has no reason to refuse and may be chosen without being named

A named backend that refuses is `BackendUnavailable` with every reason. The choice is cached under the call's numbers
(`Request`: integers, enums, dtypes), so that a call costs microseconds and no cache holds on to a tensor. Packages are
imported only once nothing else speaks against them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from kvtide.kvcache import BackendUnavailable, ConfigError

from .adapters import cutlass, flash_attention, flashinfer, flashmla, tokenspeed
from .contract import MlaCall
from .support import Request, Support, reasons

VARIABLE = "KVTIDE_ATTENTION_BACKEND"
Decode = Callable[[MlaCall], None]
_log = logging.getLogger(__name__)


class Backend(Enum):
    """The backends that kvtide brings or adapts; the value is the name that selects it."""

    TORCH_REFERENCE = "TORCH_REFERENCE"
    CPU = "CPU"
    TRITON_MLA = "TRITON_MLA"
    FLASHMLA = "FLASHMLA"
    FLASH_ATTN_MLA = "FLASH_ATTN_MLA"
    FLASHINFER_MLA = "FLASHINFER_MLA"
    TOKENSPEED_MLA = "TOKENSPEED_MLA"
    CUTLASS_MLA = "CUTLASS_MLA"


@dataclass(frozen=True)
class Kernel:
    """One implementation: what it supports, and `load`, which imports it and returns the function to call.

    The text of whatever `load` raises is the reason for refusing.
    """

    support: Support
    load: Callable[[], Decode]


class Verdict(NamedTuple):
    """What `explain` says of one backend: `reasons` is empty where it is available.

    `by_name_only` says why it is not chosen unless it is named; None where it may be.
    """

    name: str
    reasons: tuple[str, ...]
    by_name_only: str | None


def _own(module: str) -> Callable[[], Decode]:
    def load() -> Decode:
        decode: Decode = import_module(f".{module}", __package__).decode
        return decode

    return load


def _adapted(load: Callable[[], object], decode: Decode) -> Callable[[], Decode]:
    def load_package() -> Decode:
        load()
        return decode

    return load_package


# Wider pieces or ropes do not fit the shared memory that its tiles are made for, and FP8_DS has a scale per 128.
_TRITON = Support(
    architectures=("8.0+",),
    max_piece=128,
    max_rope=64,
    window="any",
    sink=True,
    batch_invariant=True,
    cuda_graph=True,
    package="triton",
    distribution="kvtide[triton]",
)
# A backend can have several kernels, for different architectures.
_kernels: dict[str, tuple[Kernel, ...]] = {
    Backend.TORCH_REFERENCE.value: (Kernel(Support(window="any", sink=True, batch_invariant=True), _own("reference")),),
    Backend.CPU.value: (
        Kernel(Support(architectures=("cpu",), window="any", sink=True, batch_invariant=True), _own("cpu")),
    ),
    Backend.TRITON_MLA.value: (
        Kernel(_TRITON, _own("triton_mla")),
        Kernel(replace(_TRITON, architectures=("cpu",), cuda_graph=False, interpreted=True), _own("triton_mla")),
    ),
    Backend.FLASHMLA.value: (Kernel(flashmla.SUPPORT, _adapted(flashmla.load, flashmla.decode)),),
    Backend.FLASH_ATTN_MLA.value: (
        Kernel(flash_attention.SUPPORT, _adapted(flash_attention.load, flash_attention.decode)),
        Kernel(flash_attention.SUPPORT_4, _adapted(flash_attention.load_4, flash_attention.decode_4)),
    ),
    Backend.FLASHINFER_MLA.value: (Kernel(flashinfer.SUPPORT, _adapted(flashinfer.load, flashinfer.decode)),),
    Backend.TOKENSPEED_MLA.value: (Kernel(tokenspeed.SUPPORT, _adapted(tokenspeed.load, tokenspeed.decode)),),
    Backend.CUTLASS_MLA.value: (Kernel(cutlass.SUPPORT, _adapted(cutlass.load, cutlass.decode)),),
}
_registered: list[str] = []

# Per architecture, the first that matches. vLLM's order for each; 12.x and 8.x have nothing but the Triton kernel.
_ORDER: tuple[tuple[str, tuple[Backend, ...]], ...] = (
    ("cpu", (Backend.CPU,)),
    (
        "10.x",
        (
            Backend.FLASHINFER_MLA,
            Backend.TOKENSPEED_MLA,
            Backend.CUTLASS_MLA,
            Backend.FLASH_ATTN_MLA,
            Backend.TRITON_MLA,
        ),
    ),
    ("9.0", (Backend.FLASH_ATTN_MLA, Backend.FLASHMLA, Backend.TRITON_MLA)),
    ("8.0+", (Backend.TRITON_MLA,)),
)


class Preference(NamedTuple):
    """A batch shape for which one backend goes before the others of its architecture, and whose finding that is."""

    architecture: str
    holds: Callable[[Request], bool]
    first: Backend
    why: str


_PREFERENCES = (
    Preference(
        "10.x",
        # FlashInfer's own rule for leaving its large tiles: heads * queries * keys, and a short context.
        lambda r: r.batch * r.rows * r.kv_len <= 2**21 and r.kv_len <= 4096,
        Backend.TRITON_MLA,
        "small work: tiles of 16 rows beat those of 64 and 128",
    ),
    Preference(
        "10.x",
        # Measured on B200 at 16 heads, q_len 4, 80k keys: 112 against 89 us at batch 4, 112 against 181 at batch 8.
        lambda r: r.batch >= 8,
        Backend.TOKENSPEED_MLA,
        "from a batch of 8 on it is faster than FlashInfer's",
    ),
)


def select(call: MlaCall, backend: Backend | str | None = None, *, finite_unused: bool = False) -> Decode:
    """The function that answers `call`. `BackendUnavailable` if the named backend refuses, or if every one does.

    `finite_unused` promises that the pool holds no NaN and no infinity, not even where no token is (`Request.of`); it
    widens the choice.
    """
    name = _named(backend)
    request = Request.of(call, finite_unused)
    return _choose(request) if name is None else _force(request, name)


def explain(request: Request) -> list[Verdict]:
    """Every backend with all its reasons for refusing `request`: first those of `priority`, then the others."""
    order = priority(request)
    names = [*order, *(name for name in _kernels if name not in order)]
    return [Verdict(name, *_judge(name, request)) for name in names]


def priority(request: Request) -> tuple[str, ...]:
    """The backends of the request's architecture, in the order in which they are asked."""
    order = next((order for architecture, order in _ORDER if request.machine.is_a(architecture)), ())
    names = [*_registered, *(backend.value for backend in order), Backend.TORCH_REFERENCE.value]
    preferred = preference(request)
    if preferred is not None:
        names.remove(preferred.first.value)
        names.insert(len(_registered), preferred.first.value)
    return tuple(names)


def preference(request: Request) -> Preference | None:
    """The preference that the request's batch shape falls under."""
    return next((p for p in _PREFERENCES if request.machine.is_a(p.architecture) and p.holds(request)), None)


def pick(request: Request, backend: Backend | str | None = None) -> str:
    """The name of the backend that `select` would take for such a call."""
    name = _named(backend)
    return _first(request) if name is None else _checked(request, name)


def register(name: str, *kernels: Kernel) -> None:
    """Add a backend of your own; it is asked before all others, and can be named like them.

        register("MY_MLA", Kernel(Support(architectures=("9.0",), pages=(64,)), load=lambda: my_package.decode))

    A name that is taken is replaced, one of kvtide's own is refused.
    """
    if name in Backend.__members__:
        raise ConfigError(f"the backend name {name} is kvtide's own; choose another")
    if not kernels:
        raise ConfigError(f"the backend {name} has no kernel; give at least one")
    if name not in _registered:
        _registered.append(name)
    _kernels[name] = kernels
    for cache in (_choose, _force, _load):
        cache.cache_clear()


def _named(backend: Backend | str | None) -> str | None:
    """The backend that the argument or the environment names."""
    if isinstance(backend, Backend):
        return backend.value
    source = "backend" if backend is not None else VARIABLE
    name = os.environ.get(VARIABLE, "") if backend is None else backend
    if not isinstance(name, str):
        raise ConfigError(f"backend is {name!r}; it must be one of {', '.join(_kernels)}")
    name = name.strip().upper()
    if not name and backend is None:
        return None
    if name not in _kernels:
        raise ConfigError(f"{source} {name[:40]!r} is not known; allowed are {', '.join(_kernels)}")
    return name


@lru_cache(maxsize=4096)
def _choose(request: Request) -> Decode:
    return _load(_kernel_for(_first(request), request))


@lru_cache(maxsize=4096)
def _force(request: Request, name: str) -> Decode:
    return _load(_kernel_for(_checked(request, name), request))


def _first(request: Request) -> str:
    refused: list[str] = []
    for name in priority(request):
        found, by_name_only = _judge(name, request)
        if not found and by_name_only is None:
            _log.info("%s is chosen for %s; before it: %s", name, request, "; ".join(refused) or "none")
            return name
        refused.append(f"{name}: {', '.join(found or (by_name_only or '',))}")
    raise BackendUnavailable(f"no attention backend can run this call ({'; '.join(refused)})")


def _checked(request: Request, name: str) -> str:
    found, _ = _judge(name, request)
    if found:
        raise BackendUnavailable(f"the attention backend {name} cannot run this call: {'; '.join(found)}")
    return name


def _judge(name: str, request: Request) -> tuple[tuple[str, ...], str | None]:
    """All reasons against a backend, and why it is not chosen unnamed."""
    kernel = _kernel_for(name, request)
    found = reasons(kernel.support, request)
    package = kernel.support.package
    if package is not None and find_spec(package) is None:
        found.append(f"the package {package} is not installed (pip install '{kernel.support.distribution}')")
    elif not found:
        try:
            _load(kernel)
        except Exception as error:  # whatever a package does when it is imported, the others can still run
            # What a loader wraps, such as the name of a missing library, says more than its own words.
            words = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
            found.append(f"it does not load: {' '.join(words.split())[:300]}")
    return tuple(found), kernel.support.by_name_only(request)


def _kernel_for(name: str, request: Request) -> Kernel:
    """The kernel of a backend for the request's architecture; where there is none, one that names all of them."""
    kernels = _kernels[name]
    for kernel in kernels:
        architectures = kernel.support.architectures
        if architectures is None or any(map(request.machine.is_a, architectures)):
            return kernel
    every = tuple(a for kernel in kernels for a in kernel.support.architectures or ())
    return replace(kernels[0], support=replace(kernels[0].support, architectures=every))


@lru_cache(maxsize=64)
def _load(kernel: Kernel) -> Decode:
    return kernel.load()
