"""What a backend can run: `Support` declares it, `Request` describes a call in plain numbers, `reasons` compares them.

A reason is a short phrase with the value and what is allowed; all of them are collected, always in the order of the
fields of `Support`, so that whoever is refused sees at once everything that would have to change.

    block size         a kernel with pages of 64 takes blocks of 64, 128, 192, ...: a larger block is *re-cut*, that is,
                       its table entry becomes several. Entries count multiples of the view's stride(0), so the re-cut
                       view's stride is the largest one that reaches every page of every block.

A `Request` holds integers, enums and dtypes only, never a tensor: it is the key of the registry's cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from .contract import MlaCall
from .device import Machine, machine_of
from .formats import LatentFormat

_HALF = frozenset({torch.float16, torch.bfloat16})
_INT32_MAX = 2**31 - 1
# Pieces in which kvtide's Triton kernel keeps a latent.
MAX_PIECES = 4


class Request(NamedTuple):
    """An `MlaCall` in numbers. `batch` and `kv_len` are rounded up to powers of two: they only steer the order.

    Strides are in bytes. `kv_len` is what the block table has room for, since lengths live on the device.
    """

    machine: Machine
    query_dtype: torch.dtype
    fmt: LatentFormat
    latent_dim: int
    rope_dim: int
    heads: int
    q_len: int
    batch: int
    kv_len: int
    block_size: int
    entries: int
    block_stride: int
    token_stride: int
    window: int | None
    sink: bool
    varlen: bool
    batch_invariant: bool
    capturing: bool
    finite_unused: bool

    @classmethod
    def of(cls, call: MlaCall, finite_unused: bool = False) -> Request:
        """What `call` asks for. `finite_unused`: whoever owns the pool promises that it holds no NaN and no infinity.

        That is true of a pool that starts as zeros and only ever holds one type of value. Where pages move between
        groups of different types, what one of them leaves behind can be NaN to another.
        """
        query, cache = call.query, call.cache
        batch, q_len, heads, _ = query.shape
        entries, block_size, _ = cache.shape
        block_stride, token_stride, _ = cache.stride()
        itemsize = cache.itemsize
        return cls(
            machine_of(query.device),
            query.dtype,
            call.fmt,
            call.latent_dim,
            call.rope_dim,
            heads,
            q_len,
            _power_of_two(batch),
            _power_of_two(call.block_table.shape[1] * block_size),
            block_size,
            entries,
            block_stride * itemsize,
            token_stride * itemsize,
            call.window,
            call.sink is not None,
            call.q_lens is not None,
            call.batch_invariant,
            query.is_cuda and torch.cuda.is_current_stream_capturing(),
            finite_unused,
        )

    @property
    def rows(self) -> int:
        """Query rows of one request: all of them read the same latents."""
        return self.heads * self.q_len


class Recut(NamedTuple):
    """How blocks become kernel pages: entry e of a block becomes e * `scale` + i * `step` for its page i.

    `stride` is the view's stride(0) in bytes, `factor` the number of pages of a block.
    """

    page: int
    factor: int
    stride: int
    scale: int
    step: int


def recut(block_size: int, page: int, block_stride: int, token_stride: int) -> Recut | None:
    """How blocks of `block_size` tokens are cut into pages; None where a page does not divide a block."""
    if block_size % page:
        return None
    factor, page_bytes = block_size // page, page * token_stride
    if factor == 1:
        return Recut(page, 1, block_stride, 1, 0)
    # Every page must start at a whole entry; the greatest common divisor is the largest unit that allows it.
    stride = math.gcd(block_stride, page_bytes)
    return Recut(page, factor, stride, block_stride // stride, page_bytes // stride)


@dataclass(frozen=True, kw_only=True)
class Support:
    """What a backend declares; None means that anything goes.

    `architectures`: "cpu", "9.0" (that compute capability), "10.x" (its family), "8.0+" (from there on).
    `pages`: the kernel's page sizes, the preferred first; larger blocks are re-cut. `block_multiple`: for kernels that
    take any such block as it is. `same_dtype`: a cache that is not FP8 has to be of the query's type.
    `window`: "block" takes windows that are no shorter than the q_len query tokens themselves.
    `dims`: the only latent and rope widths. `max_piece`, `max_rope`: a latent of one to four pieces of one power of
    two, from 16 to `max_piece` values, and a rope of up to `max_rope`.
    `stride_alignment`: bytes that must divide the strides; `compact`: no gap between pages or tokens at all.
    `package`: the module whose presence is looked for, `distribution`: what brings it.
    `quantizes_query`: computes an FP8 cache with an FP8 query. `reads_unused`: multiplies slots that no token fills by
    zero, or nobody has shown that it does not, so that NaN there spoils the result. Such a backend is not chosen unless
    it is named; one that reads unused slots also where the call promises that they are finite. `interpreted`: for tests
    of a GPU's kernel, and never chosen unless named.
    """

    architectures: tuple[str, ...] | None = None
    query_dtypes: frozenset[torch.dtype] | None = None
    formats: frozenset[LatentFormat] = frozenset(LatentFormat)
    same_dtype: bool = False
    dims: tuple[int, int] | None = None
    max_piece: int | None = None
    max_rope: int | None = None
    max_heads: int | None = None
    max_q_len: int | None = None
    pages: tuple[int, ...] | None = None
    block_multiple: int = 1
    stride_alignment: int = 1
    compact: bool = False
    window: Literal["none", "block", "any"] = "none"
    sink: bool = False
    varlen: bool = True
    batch_invariant: bool = False
    cuda_graph: bool = False
    package: str | None = None
    distribution: str | None = None
    quantizes_query: bool = False
    reads_unused: bool = False
    interpreted: bool = False

    def cut(self, block_size: int, block_stride: int, token_stride: int) -> Recut | None:
        """How this backend's kernel pages come out of blocks; None where none of its page sizes divides them."""
        for page in self.pages or (block_size,):
            cut = recut(block_size, page, block_stride, token_stride)
            if cut is not None:
                return cut
        return None

    def by_name_only(self, request: Request) -> str | None:
        """Why this backend is never chosen for `request` unless it is named."""
        if self.reads_unused and not request.finite_unused:
            return "may read slots that no token fills, so runs only when named, or where these are known to be finite"
        if self.quantizes_query and request.fmt is LatentFormat.FP8:
            return "rounds the query to FP8, so runs only when named"
        if self.interpreted:
            return "runs in Triton's interpreter here, which is slow, so only when named"
        return None


def reasons(support: Support, request: Request) -> list[str]:
    """Everything about `request` that `support` does not cover; empty when it covers all."""
    s, r = support, request
    found = [
        _architecture(s, r),
        s.query_dtypes is not None
        and r.query_dtype not in s.query_dtypes
        and f"query {_name(r.query_dtype)} is not {_either(sorted(map(_name, s.query_dtypes)))}",
        r.fmt not in s.formats
        and f"format {r.fmt.value} is not {_either([f.value for f in LatentFormat if f in s.formats])}",
        s.same_dtype
        and r.fmt in s.formats
        and r.fmt.storage_dtype in _HALF
        and r.query_dtype in _HALF
        and r.fmt.storage_dtype != r.query_dtype
        and f"cache {r.fmt.value} is not the query's {_name(r.query_dtype)}",
        s.dims is not None
        and (r.latent_dim, r.rope_dim) != s.dims
        and f"latent {r.latent_dim} + rope {r.rope_dim} is not {s.dims[0]} + {s.dims[1]}",
        *_widths(s, r),
        s.max_heads is not None and r.heads > s.max_heads and f"{r.heads} heads are more than {s.max_heads}",
        s.max_q_len is not None and r.q_len > s.max_q_len and f"q_len {r.q_len} is more than {s.max_q_len}",
        *_blocks(s, r),
        r.window is not None
        and (
            (s.window == "none" and f"no sliding window, and {r.window} is asked for")
            or (s.window == "block" and r.window < r.q_len and f"window {r.window} is less than q_len {r.q_len}")
        ),
        r.sink and not s.sink and "no attention sink",
        r.varlen and not s.varlen and "no query length per row",
        r.batch_invariant and not s.batch_invariant and "a row's result may depend on its batch",
        r.capturing and not s.cuda_graph and "cannot be captured in a CUDA graph",
    ]
    return [reason for reason in found if reason]


def _architecture(s: Support, r: Request) -> str | None:
    if s.architectures is None or any(r.machine.is_a(architecture) for architecture in s.architectures):
        return None
    return f"this is {r.machine}, it runs on {_either(s.architectures)}"


def pieces(latent_dim: int, most: int | None = None) -> tuple[int, int] | None:
    """A latent's pieces as (count, width): the narrowest power of two, from 16 to `most`, that cuts it into 1 to 4."""
    width = 16
    while latent_dim % width == 0 and latent_dim > MAX_PIECES * width:
        width *= 2
    if latent_dim % width or not latent_dim or (most is not None and width > most):
        return None
    return latent_dim // width, width


def _widths(s: Support, r: Request) -> list[str]:
    found = []
    if s.max_piece is not None and pieces(r.latent_dim, s.max_piece) is None:
        found.append(
            f"latent {r.latent_dim} is not one to {MAX_PIECES} pieces of one power of two from 16 to {s.max_piece}"
        )
    if s.max_rope is not None and r.rope_dim > s.max_rope:
        found.append(f"rope {r.rope_dim} is more than {s.max_rope}")
    return found


def _blocks(s: Support, r: Request) -> list[str]:
    """What is wrong with the blocks: their size, and the strides of the pages that they are cut into."""
    if r.block_size % s.block_multiple:
        return [f"block size {r.block_size} is not a multiple of {s.block_multiple}"]
    cut = s.cut(r.block_size, r.block_stride, r.token_stride)
    if cut is None:
        return [f"block size {r.block_size} is not a multiple of {_either(s.pages or ())}"]
    found = []
    for name, stride in (("page", cut.stride), ("token", r.token_stride)):
        if stride % s.stride_alignment:
            found.append(f"{name} stride of {stride} bytes is not a multiple of {s.stride_alignment}")
    width = r.fmt.token_bytes(r.latent_dim, r.rope_dim)
    if s.compact and (cut.stride != cut.page * r.token_stride or r.token_stride != width):
        found.append(
            f"pages {cut.stride:,} bytes apart are not the {cut.page * width:,} bytes of a compact cache of one layer"
        )
    if (r.entries - 1) * cut.scale + (cut.factor - 1) * cut.step > _INT32_MAX:
        found.append(f"blocks cut into pages of {cut.page} need table entries beyond int32")
    return found


def _either(values: tuple[object, ...] | list[str]) -> str:
    *rest, last = map(str, values)
    return f"{', '.join(rest)} or {last}" if rest else last


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count > 0 else 0
