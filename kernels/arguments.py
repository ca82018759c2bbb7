"""Checks of the public functions' arguments: one sentence that names the argument, its value and what is allowed.

Only what the host knows is looked at (shapes, dtypes, devices, strides, plain numbers), so that no check waits for a
device and all of them can run inside the capture of a CUDA graph. A dimension is a number, or a letter for any size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from kvtide.kvcache import ConfigError

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INT32 = (torch.int32,)
FLOAT32 = (torch.float32,)
_one: dict[torch.device, torch.Tensor] = {}


def check_tensor(
    name: str, value: object, shape: Sequence[int | str], dtypes: Sequence[torch.dtype], device: torch.device | None
) -> torch.Tensor:
    """`value` if it is a tensor of that shape, one of these dtypes, and on that device; otherwise `ConfigError`."""
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{name} is a {type(value).__name__}; it must be a torch tensor")
    matches = value.dim() == len(shape) and all(
        isinstance(wanted, str) or wanted == size for wanted, size in zip(shape, value.shape, strict=True)
    )
    if not matches:
        wanted = ", ".join(map(str, shape))
        raise ConfigError(f"{name} has the shape {list(value.shape)}; it must be [{wanted}]")
    if value.dtype not in dtypes:
        raise ConfigError(f"{name} is {_name(value.dtype)}; it must be {' or '.join(map(_name, dtypes))}")
    if device is not None and value.device != device:
        raise ConfigError(f"{name} is on {value.device}; it must be on {device}, as the other tensors are")
    return value


def check_rows(name: str, value: object, shape: Sequence[int | str], device: torch.device) -> torch.Tensor:
    """An int32 tensor (a table, or one number a row), made contiguous in its last dimension."""
    rows = check_tensor(name, value, shape, INT32, device)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def check_contiguous(name: str, value: torch.Tensor, dimensions: int = 1) -> None:
    """That the last `dimensions` dimensions lie side by side."""
    compact = 1
    for size, stride in zip(reversed(value.shape[-dimensions:]), reversed(value.stride()[-dimensions:]), strict=True):
        if size != 1 and stride != compact:
            raise ConfigError(
                f"{name} has the strides {list(value.stride())}; its last {dimensions} dimension(s) must be contiguous"
            )
        compact *= size


def check_result(
    name: str, value: object, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A result tensor that the caller gave, or a new one."""
    if value is None:
        return torch.empty(shape, dtype=dtype, device=device)
    result = check_tensor(name, value, shape, (dtype,), device)
    if name == "out":
        check_contiguous(name, result)
    return result


def check_scale(scale: object) -> float:
    """The softmax scale. There is no default: a model's scale is not the head dimension's in absorbed form."""
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ConfigError(f"scale is {scale!r}; it must be a finite number")
    return float(scale)


def check_count(name: str, value: object, low: int = 1) -> None:
    """That a whole number is at least `low`, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {low}, or None")


def check_sink(name: str, sink: object, heads: int, device: torch.device) -> torch.Tensor | None:
    """One logit a head, as float32."""
    if sink is None:
        return None
    return check_tensor(name, sink, (heads,), QUERY_DTYPES, device).to(torch.float32).contiguous()


def quantisation_scale(name: str, value: object, device: torch.device, *, is_fp8: bool) -> torch.Tensor:
    """The scale of an FP8 cache as float32 [1] on the device; 1 for every other cache."""
    if isinstance(value, torch.Tensor):
        if not is_fp8:
            raise ConfigError(f"{name} is a tensor; only a cache of fp8_e4m3 takes one")
        shape = (1,) if value.dim() else ()
        return check_tensor(name, value, shape, FLOAT32, device).reshape(1)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise ConfigError(f"{name} is {value!r}; it must be a number above 0, or a float32 tensor of one")
    if value != 1:
        if not is_fp8:
            raise ConfigError(f"{name} is {value!r}; only a cache of fp8_e4m3 takes another than 1")
        return torch.full((1,), float(value), dtype=torch.float32, device=device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # Made in a capture, it would hold nothing before the graph's first replay.
        return torch.ones(1, device=device)
    if device not in _one:
        _one[device] = torch.ones(1, device=device)
    return _one[device]


def check_choice(name: str, value: object, choices: Mapping[str, object] | Sequence[str]) -> None:
    """That a text is one of a few, or None."""
    if value is not None and value not in tuple(choices):
        raise ConfigError(f"{name} is {value!r}; allowed are {', '.join(choices)}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
