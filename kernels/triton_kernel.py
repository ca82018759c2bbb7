"""One Triton source, two ways to run it: compiled on a GPU, interpreted on CPU tensors.

    plain function --+-- JITFunction          CUDA tensors, and offline compilation for any architecture
                     +-- InterpretedFunction  CPU tensors: slow, exact about masks, pointers and control flow

Triton's own decorator picks one of the two when a module is imported, from an environment variable; here both exist
side by side, so that one process can test the kernels in the interpreter and compile them for several GPUs.

The interpreter differs in three ways that kernels must know: `tl.dot` of bfloat16 is wrong (kernels upcast, see
`dot`), float32 to bfloat16 truncates (see `round_to`), and the library's reductions are callable only as `tl.reduce`.
Needs triton, and numpy for the interpreter.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtide.kvcache import MissingExtra

try:
    import triton.language as tl  # type: ignore[import-untyped]
    from triton.runtime.interpreter import InterpretedFunction  # type: ignore[import-untyped]
    from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]
except ImportError:
    raise MissingExtra("a Triton kernel", "triton", "triton") from None

import torch

__all__ = [
    "DeviceFunction",
    "Launch",
    "TritonKernel",
    "dot",
    "e4m3_to",
    "load_rows",
    "round_to",
    "row_max",
    "row_sum",
    "tl",
    "to_e4m3",
    "with_sink",
]


_interpreter = threading.RLock()


class TritonKernel:
    """A kernel's plain function, to launch on tensors of either device.

    `varying` names integer parameters that change from step to step: compiling again for their divisibility would cost
    more than it gains.
    """

    def __init__(self, function: Callable[..., None], varying: Sequence[str] = ()) -> None:
        self.compiled: Any = JITFunction(function, do_not_specialize=list(varying))
        self.interpreted: Any = InterpretedFunction(function)
        self.varying = frozenset(varying)


class DeviceFunction(JITFunction):  # type: ignore[misc]  # triton has no types
    """A function that kernels call: inlined by the compiler, called as Python by the interpreter."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._interpreted = InterpretedFunction(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run inside an interpreted kernel, whose launch has put the interpreter's operations in place."""
        return self._interpreted.rewrite()(*args, **kwargs)


@dataclass(frozen=True)
class Launch:
    """A kernel with all that its launch takes; `warps` and `stages` matter on a GPU only."""

    kernel: TritonKernel
    grid: tuple[int, int, int]
    args: dict[str, Any]
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int | bool]:
        """Compiler options. Contraction of products and sums is asked for: Triton's default is about to change."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}

    def run(self) -> None:
        """Launch on the device of the arguments: interpreted on a CPU, enqueued on the current stream of a GPU."""
        if 0 in self.grid:
            return
        tensors = [arg for arg in self.args.values() if isinstance(arg, torch.Tensor)]
        if tensors[0].device.type == "cpu":
            # The interpreter puts its operations into Triton's own modules while it runs.
            with _interpreter:
                self.kernel.interpreted[self.grid](**self.args)
        else:
            with torch.cuda.device(tensors[0].device):
                self.kernel.compiled[self.grid](**self.args, **self.options)


@DeviceFunction
def dot(a, b, acc, UPCAST: tl.constexpr):  # noqa: N803
    """`acc + a @ b`; float32 operands in full precision, and every operand as float32 in the interpreter."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@DeviceFunction
def row_max(x):
    """The maximum along the last of two dimensions."""
    return tl.reduce(x, 1, tl.standard._elementwise_max)


@DeviceFunction
def row_sum(x):
    """The sum along the last of two dimensions."""
    return tl.reduce(x, 1, tl.standard._sum_combine)


@DeviceFunction
def round_to(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):  # noqa: N803
    """`x` as `DTYPE`, rounded to nearest, also to bfloat16 where the interpreter would truncate."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@DeviceFunction
def load_rows(at, live, columns):
    """`[at, columns]`, zero where not live: 0 times whatever lies there could be NaN."""
    return tl.load(at[:, None] + columns[None, :], mask=live[:, None], other=0)


@DeviceFunction
def with_sink(log_sum, logit):
    """The base-2 logarithm of the sum with one logit more; a sum without a key stays -inf."""
    seen = log_sum > float("-inf")
    high = tl.where(seen, tl.maximum(log_sum, logit), 0.0)
    return tl.where(seen, high + tl.log2(tl.exp2(log_sum - high) + tl.exp2(logit - high)), float("-inf"))


_CVT = tl.constexpr(
    "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }"
)
# Every byte to the upper half of 16 bits, then all but the sign one bit down.
_SHIFT = tl.constexpr(
    "{ .reg .b32 x, y; "
    "prmt.b32 x, $2, 0, 0x1404; and.b32 y, x, 0x80008000; shr.u32 x, x, 1; lop3.b32 $0, x, 0x3f803f80, y, 0xEA; "
    "prmt.b32 x, $2, 0, 0x3424; and.b32 y, x, 0x80008000; shr.u32 x, x, 1; lop3.b32 $1, x, 0x3f803f80, y, 0xEA; }"
)


@DeviceFunction
def e4m3_to(raw, DTYPE: tl.constexpr, BYTES: tl.constexpr, INTERPRETED: tl.constexpr):  # noqa: N803
    """Bytes of e4m3 as `DTYPE`, exactly; with `BYTES` divided by 256, for GPUs without an FP8 type (before sm_89).

    e4m3 and float16 have their fields in the same order, so that moving the bits is all: float16's exponent bias is
    8 larger, its subnormals take over e4m3's. e4m3's NaN turns into 480 / 256 there.

    Compiled, four bytes are converted at a time by assembly that is declared impure. Triton moves a pure conversion
    past the layout change of either product that uses the values: then it happens twice, and the load, whose bytes now
    feed two layouts, is no longer asynchronous.
    """
    if not INTERPRETED:
        assembly: tl.constexpr = _SHIFT if BYTES else _CVT
        value = tl.inline_asm_elementwise(assembly, "=r,=r,r", [raw], dtype=tl.float16, is_pure=False, pack=4)
    elif BYTES:
        bits = raw.to(tl.uint16)
        value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    else:
        value = raw.to(tl.float8e4nv, bitcast=True)
    return value.to(DTYPE)


@DeviceFunction
def to_e4m3(x):
    """Float32 as bytes of e4m3: nearest, ties to even, saturating at 448; NaN stays NaN.

    By integer arithmetic on every GPU, those without an FP8 type included: a cache write is bound by memory anyway.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    size_bits = size.to(tl.int32, bitcast=True)
    # Normal: drop 20 of 23 fraction bits, rebias the exponent from 127 to 7.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 codes count steps of 2**-9, which is one step of float32 at 2**14.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8)
