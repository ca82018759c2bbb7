"""Put together two attention results of the same queries over disjoint keys: context and new tokens, or two shards.

The result is what one attention over all keys gives. (0, -inf), a result over no keys, is the identity on either side
and on both; what stands in the `out` of such a result does not matter, be it NaN.
"""

from __future__ import annotations

import math

import torch

from kvtide.kvcache import ConfigError

from .arguments import FLOAT32, QUERY_DTYPES, check_result, check_tensor, check_written
from .contract import AttentionResult


@torch.no_grad()
def merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> AttentionResult:
    """The attention over the keys of both.

    `out_a`, `out_b` [..., dim] of any float dtypes; `lse_a`, `lse_b` float32 [...], natural logarithms; each of any
    strides. `out` (of the dtype of `out_a` unless given) and `lse` may be one of the inputs. Sums in
    float32. `ConfigError` for shapes that differ.
    """
    if not isinstance(out_a, torch.Tensor) or not out_a.dim():
        raise ConfigError(f"out_a is {out_a!r:.60}; it must be a tensor [..., dim]")
    device = out_a.device
    out_a = check_tensor("out_a", out_a, tuple(out_a.shape), QUERY_DTYPES, device)
    out_b = check_tensor("out_b", out_b, tuple(out_a.shape), QUERY_DTYPES, device)
    shape = tuple(out_a.shape[:-1])
    lse_a = check_tensor("lse_a", lse_a, shape, FLOAT32, device)
    lse_b = check_tensor("lse_b", lse_b, shape, FLOAT32, device)
    if out is not None:
        check_written("out", check_tensor("out", out, tuple(out_a.shape), QUERY_DTYPES, device))
    highest = torch.maximum(lse_a, lse_b)
    # Nothing on either side: any finite number keeps -inf minus -inf away.
    highest = highest.masked_fill(highest == -math.inf, 0)
    weight_a, weight_b = torch.exp(lse_a - highest), torch.exp(lse_b - highest)
    total = weight_a + weight_b
    norm = total.masked_fill(total == 0, 1)
    parts = [
        (part.float() * (weight / norm)[..., None]).masked_fill((partial == -math.inf)[..., None], 0)
        for part, weight, partial in ((out_a, weight_a, lse_a), (out_b, weight_b, lse_b))
    ]
    merged_lse = check_result("lse", lse, shape, torch.float32, device).copy_(highest + total.log())
    merged = torch.empty_like(out_a) if out is None else out
    return AttentionResult(merged.copy_(parts[0] + parts[1]), merged_lse)
