"""Scales of FP8 caches, which live on the device and which some kernels want as numbers of the host.

    number -> float32 [1] on the device, its value known           tensor -> itself, its value read once when asked for

Needs torch.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import MutableMapping

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kvtide.kvcache import BackendUnavailable, ConfigError

from .arguments import FLOAT32, check_tensor

# Values of scale tensors, with the version that they were read at. Weak: it owns no tensor.
_values: MutableMapping[torch.Tensor, tuple[int, float]] = WeakIdKeyDictionary()
_one: dict[torch.device, torch.Tensor] = {}


def quantisation_scale(name: str, value: object, device: torch.device, *, is_fp8: bool) -> torch.Tensor:
    """The scale of an FP8 cache as float32 [1] on the device; 1 for every other cache."""
    if isinstance(value, torch.Tensor):
        if not is_fp8:
            raise ConfigError(f"{name} is a tensor; only a cache of fp8_e4m3 takes one")
        shape = (1,) if value.dim() else ()
        check_tensor(name, value, shape, FLOAT32, device)
        return value if value.dim() else value.reshape(1)
    number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"{name} is {value!r}; it must be a number above 0, or a float32 tensor of one")
    if number != 1:
        if not is_fp8:
            raise ConfigError(f"{name} is {value!r}; only a cache of fp8_e4m3 takes another than 1")
        return _made(number, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # Made in a capture, it would hold nothing before the graph's first replay.
        return _made(1.0, device)
    if device not in _one:
        _one[device] = _made(1.0, device)
    return _one[device]


def host_scale(k_scale: torch.Tensor) -> float:
    """The value of a scale tensor. Read from the device once for each tensor and in-place change, so not per step."""
    # An inference tensor does not count its changes: it is read each time.
    version = -1 if k_scale.is_inference() else k_scale._version
    known = _values.get(k_scale)
    if known is not None and known[0] == version:
        return known[1]
    outside_capture(k_scale.device, "the FP8 scale has to be read from the device")
    value = float(k_scale)
    if version >= 0:
        _values[k_scale] = (version, value)
    return value


def outside_capture(device: torch.device, what: str) -> None:
    """`BackendUnavailable` where a CUDA graph is being captured: `what` would not be part of it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise BackendUnavailable(f"{what} before a CUDA graph is captured; run such a call once first")


def _made(number: float, device: torch.device) -> torch.Tensor:
    # An ordinary tensor, whatever mode the caller is in.
    with torch.inference_mode(False):
        scale = torch.full((1,), number, dtype=torch.float32, device=device)
        # What the device holds: the number in float32.
        _values[scale] = (scale._version, float(torch.tensor(number, dtype=torch.float32)))
    return scale
