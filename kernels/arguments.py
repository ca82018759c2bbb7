"""Checks of the public functions' arguments: one sentence that names the argument, its value and what is allowed.

Only what the host knows is looked at (shapes, dtypes, devices, strides, plain numbers), so that no check waits for a
device and all of them can run inside the capture of a CUDA graph. A dimension is a number, or a letter for any size.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence

import torch

from kvtide.kvcache import ConfigError

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INT32 = (torch.int32,)
FLOAT32 = (torch.float32,)
# A row longer than this does not exist; a larger window, chunk or number of sinks is this, and int32 does not overflow.
MAX_TOKENS = 2**30


def check_tensor(
    name: str, value: object, shape: Sequence[int | str], dtypes: Sequence[torch.dtype], device: torch.device | None
) -> torch.Tensor:
    """`value` if it is a tensor of that shape, one of these dtypes, and on that device; otherwise `ConfigError`."""
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{name} is a {type(value).__name__}; it must be a torch tensor")
    if value.layout != torch.strided:
        raise ConfigError(f"{name} is {str(value.layout).removeprefix('torch.')}; it must be a dense tensor")
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
    if value.is_meta:
        raise ConfigError(f"{name} is on meta, where tensors hold no numbers; it must be on a real device")
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


def check_written(name: str, value: torch.Tensor) -> None:
    """That a tensor which is written is not one that was expanded."""
    if any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)):
        raise ConfigError(f"{name} has the strides {list(value.stride())}; no two of its elements may be one in memory")


def check_result(
    name: str, value: object, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A result tensor that the caller gave, or a new one."""
    if value is None:
        return torch.empty(shape, dtype=dtype, device=device)
    result = check_tensor(name, value, shape, (dtype,), device)
    check_written(name, result)
    if name == "out":
        check_contiguous(name, result)
    return result


def check_scale(scale: object) -> float:
    """The softmax scale. There is no default: a model's scale is not the head dimension's in absorbed form."""
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not math.isfinite(scale):
        raise ConfigError(f"scale is {scale!r}; it must be a finite number")
    return float(scale)


def check_soft_cap(soft_cap: object) -> float | None:
    """What bounds the scores; None for no bound."""
    if soft_cap is None:
        return None
    if isinstance(soft_cap, bool) or not isinstance(soft_cap, numbers.Real) or not 0 < float(soft_cap) < math.inf:
        raise ConfigError(f"soft_cap is {soft_cap!r}; it must be a finite number above 0, or None")
    return float(soft_cap)


def check_whole(name: str, value: object, low: int = 1, otherwise: str = "") -> int:
    """A whole number of at least `low`; NumPy's are taken too. `otherwise` ends the message."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {low}{otherwise}")
    return int(value)


def check_tokens(name: str, value: object) -> int | None:
    """A number of tokens of at least 1, at most `MAX_TOKENS`; or None."""
    return None if value is None else min(check_whole(name, value, otherwise=", or None"), MAX_TOKENS)


def check_lengths(
    block_table: torch.Tensor, seq_lens: torch.Tensor, q_lens: torch.Tensor | None, q_len: int, block_size: int
) -> None:
    """On a CPU, that lengths fit the table and the query. Elsewhere looking would wait for the device."""
    if block_table.device.type != "cpu":
        return
    room = block_table.shape[1] * block_size
    limits = [("seq_lens", seq_lens, room, f"the {room} tokens that block_table has room for")]
    if q_lens is not None:
        limits.append(("q_lens", q_lens, q_len, f"query's {q_len} tokens"))
    for name, numbers_, high, what in limits:
        if len(numbers_):
            least, most = (int(number) for number in numbers_.aminmax())
            if least < 0 or most > high:
                raise ConfigError(f"{name} hold {least if least < 0 else most}; they must be from 0 to {what}")


def check_entries(entries: torch.Tensor, count: int) -> None:
    """On a CPU, that block table entries which are read are entries of the cache."""
    if entries.device.type == "cpu" and entries.numel():
        least, most = (int(number) for number in entries.aminmax())
        if least < 0 or most >= count:
            raise ConfigError(
                f"block_table holds {least if least < 0 else most} where keys are read; the cache has {count} entries"
            )


def check_sink(name: str, sink: object, heads: int, device: torch.device) -> torch.Tensor | None:
    """One logit a head, as float32."""
    if sink is None:
        return None
    return check_tensor(name, sink, (heads,), QUERY_DTYPES, device).to(torch.float32).contiguous()


def check_choice(name: str, value: object, choices: Mapping[str, object] | Sequence[str]) -> None:
    """That a text is one of a few, or None."""
    if value is not None and value not in tuple(choices):
        raise ConfigError(f"{name} is {value!r}; allowed are {', '.join(choices)}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
