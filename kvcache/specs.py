"""Layer specs: what one attention (or state) layer stores, and which of it a query can still reach.

A spec is frozen data, equal and hashable by value: layers with equal specs form one group. Two questions matter to
everybody above: how many bytes a token (or a state) takes, and `needed(num_tokens)`.

`needed(n)` speaks of a sequence of n tokens whose last token is the query:

    0      sinks        first                       n - 1
    |------|. . . . . . |===========================| query
     kept    dead         reachable

It keeps `[0, sinks)` and `[first, n)`. What a manager must hold *before* it computes token c (c tokens committed) is
`needed(c + 1)` cut at c, so a window's first needed token is `c - window + 1`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import StrEnum
from math import gcd, prod
from typing import ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from .dtypes import PACKED_LATENT_FORMATS, bytes_of, packed_latent_bytes
from .errors import ConfigError

Int64Array = npt.NDArray[np.int64]


class Kind(StrEnum):
    """The kinds of layer that a KV cache can hold."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    CROSS_ATTENTION = "cross_attention"
    SINK_WINDOW = "sink_window"
    MLA = "mla"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    RECURRENT_STATE = "recurrent_state"


class Component(NamedTuple):
    """One array of a layer: `shape` and `dtype` of one token's entry, or of the whole state."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of one entry."""
        return prod(self.shape) * bytes_of(self.dtype)


class Needed(NamedTuple):
    """Tokens a query can reach: `[0, sinks)` and `[first, stop)`, disjoint; int64 arrays of the input's shape."""

    sinks: Int64Array
    first: Int64Array
    stop: Int64Array

    @property
    def num_tokens(self) -> Int64Array:
        """Number of needed tokens."""
        return self.sinks + self.stop - self.first


@dataclass(frozen=True)
class LayerSpec(ABC):
    """Base of all specs. `per_image` kinds count image tokens instead of text tokens; states count neither."""

    kind: ClassVar[Kind]
    per_image: ClassVar[bool] = False

    @abstractmethod
    def components(self) -> tuple[Component, ...]:
        """The arrays of this layer, in the order in which they lie inside a block."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in this layer on this rank; 0 for a state."""
        return sum(component.num_bytes for component in self.components())

    @property
    def state_bytes(self) -> int:
        """Bytes of the one state that a sequence has in this layer; 0 for attention."""
        return 0

    @property
    def reach(self) -> int | None:
        """The most tokens, sinks apart, that a query can see; None when that grows with the sequence."""
        return None

    @property
    def has_bounded_reach(self) -> bool:
        """Whether tokens go out of reach as the sequence grows, so that only the last ones are held."""
        return self.reach is not None

    def first_needed(self, num_tokens: Int64Array) -> Int64Array:
        """First token of the contiguous part that the query at `num_tokens - 1` can reach."""
        return np.zeros_like(num_tokens)

    def needed(self, num_tokens: npt.ArrayLike) -> Needed:
        """Which tokens the last of `num_tokens` tokens can reach; a number or an int array."""
        stop = np.asarray(num_tokens, dtype=np.int64)
        return Needed(np.zeros_like(stop), self.first_needed(stop), stop)

    @abstractmethod
    def shard(self, tp_size: int) -> Self:
        """The spec of one of `tp_size` tensor-parallel ranks."""

    @abstractmethod
    def with_dtype(self, dtype: str) -> Self:
        """The same layer with another cache dtype (canonical name)."""

    @property
    @abstractmethod
    def label(self) -> str:
        """One line for people: dims, dtype and reach."""


def _require_positive(spec: LayerSpec, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} of a {spec.kind} layer is {value!r}; it must be a whole number of at least 1")


@dataclass(frozen=True)
class FullAttention(LayerSpec):
    """Keys and values of every token: `num_kv_heads` heads of `head_dim` and `head_dim_v` elements, which may differ.

    `dtype` is the cache's element type by its canonical name, such as "bfloat16" or "float8_e4m3"; of all ranks
    together until `shard` has cut the heads. `ConfigError` for sizes or a dtype that cannot be.
    """

    kind: ClassVar[Kind] = Kind.FULL_ATTENTION

    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        _require_positive(self, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, head_dim_v=self.head_dim_v)
        if self.dtype in PACKED_LATENT_FORMATS:
            raise ConfigError(f"KV cache dtype {self.dtype!r} packs MLA latents; a {self.kind} layer cannot use it")
        bytes_of(self.dtype)

    def components(self) -> tuple[Component, ...]:
        return (
            Component("k", (self.num_kv_heads, self.head_dim), self.dtype),
            Component("v", (self.num_kv_heads, self.head_dim_v), self.dtype),
        )

    def shard(self, tp_size: int) -> Self:
        """KV heads are divided among the ranks, or replicated when there are fewer heads than ranks."""
        heads = self.num_kv_heads
        if heads % tp_size and tp_size % heads:
            raise ConfigError(f"{heads} KV heads cannot be divided among tp_size {tp_size}; one must divide the other")
        return replace(self, num_kv_heads=max(1, heads // tp_size))

    def with_dtype(self, dtype: str) -> Self:
        return replace(self, dtype=dtype)

    @property
    def label(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        return f"{self.num_kv_heads} heads × {dims} {self.dtype}"


@dataclass(frozen=True)
class CrossAttention(FullAttention):
    """Keys and values of the image (or encoder) tokens; text tokens store nothing here."""

    kind: ClassVar[Kind] = Kind.CROSS_ATTENTION
    per_image: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(FullAttention):
    """A query sees itself and the `window - 1` tokens before it."""

    kind: ClassVar[Kind] = Kind.SLIDING_WINDOW

    window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, window=self.window)

    @property
    def reach(self) -> int:
        return self.window

    def first_needed(self, num_tokens: Int64Array) -> Int64Array:
        return np.maximum(num_tokens - self.window, 0)

    @property
    def label(self) -> str:
        return f"{super().label}, window {self.window}"


@dataclass(frozen=True, kw_only=True)
class SinkWindow(SlidingWindow):
    """A sliding window that also keeps the first `sinks` tokens for ever (StreamingLLM).

    Learned sink logits (gpt-oss, MiMo-V2) are weights, not tokens: those layers are plain `SlidingWindow`.
    """

    kind: ClassVar[Kind] = Kind.SINK_WINDOW

    sinks: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, sinks=self.sinks)

    def needed(self, num_tokens: npt.ArrayLike) -> Needed:
        reach = super().needed(num_tokens)
        return reach._replace(sinks=np.minimum(self.sinks, reach.first))

    @property
    def label(self) -> str:
        return f"{super().label}, {self.sinks} sinks"


@dataclass(frozen=True, kw_only=True)
class ChunkedLocal(FullAttention):
    """A query sees the tokens of its own chunk of `chunk` tokens; chunks start at multiples, they do not slide."""

    kind: ClassVar[Kind] = Kind.CHUNKED_LOCAL

    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, chunk=self.chunk)

    @property
    def reach(self) -> int:
        return self.chunk

    def first_needed(self, num_tokens: Int64Array) -> Int64Array:
        return np.maximum(num_tokens - 1, 0) // self.chunk * self.chunk

    @property
    def label(self) -> str:
        return f"{super().label}, chunk {self.chunk}"


@dataclass(frozen=True)
class MLA(LayerSpec):
    """One latent of `kv_lora_rank + rope_dim` values per token, the same on every rank (multi-head latent attention).

    `index_head_dim` > 0 adds the sparse-attention indexer's key: that many bytes, and one float32 scale per 128 of them
    (132 bytes for 128), whatever the cache dtype is.
    """

    kind: ClassVar[Kind] = Kind.MLA

    kv_lora_rank: int
    rope_dim: int
    dtype: str = "bfloat16"
    index_head_dim: int = 0

    def __post_init__(self) -> None:
        _require_positive(self, kv_lora_rank=self.kv_lora_rank, rope_dim=self.rope_dim)
        if self.index_head_dim != 0:
            _require_positive(self, index_head_dim=self.index_head_dim)
            if self.index_head_dim % 128:
                raise ConfigError(f"index_head_dim {self.index_head_dim} must be 0 or a multiple of 128")
        if self.dtype in PACKED_LATENT_FORMATS:
            packed_latent_bytes(self.dtype, self.kv_lora_rank, self.rope_dim)
        else:
            bytes_of(self.dtype)

    def components(self) -> tuple[Component, ...]:
        if self.dtype in PACKED_LATENT_FORMATS:
            latent = Component("latent", (packed_latent_bytes(self.dtype, self.kv_lora_rank, self.rope_dim),), "uint8")
        else:
            latent = Component("latent", (self.kv_lora_rank + self.rope_dim,), self.dtype)
        if not self.index_head_dim:
            return (latent,)
        return (latent, Component("indexer", (self.index_head_dim + self.index_head_dim // 128 * 4,), "uint8"))

    def shard(self, tp_size: int) -> Self:
        """Every rank holds the whole latent."""
        return self

    def with_dtype(self, dtype: str) -> Self:
        return replace(self, dtype=dtype)

    @property
    def label(self) -> str:
        indexer = f" + indexer {self.index_head_dim}" if self.index_head_dim else ""
        return f"latent {self.kv_lora_rank}+{self.rope_dim} {self.dtype}{indexer}"


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLA(MLA):
    """MLA whose queries see only the last `window` tokens."""

    kind: ClassVar[Kind] = Kind.SLIDING_WINDOW_MLA

    window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, window=self.window)

    @property
    def reach(self) -> int:
        return self.window

    def first_needed(self, num_tokens: Int64Array) -> Int64Array:
        return np.maximum(num_tokens - self.window, 0)

    @property
    def label(self) -> str:
        return f"{super().label}, window {self.window}"


@dataclass(frozen=True)
class RecurrentState(LayerSpec):
    """One state per sequence (Mamba, gated delta net, linear attention); tokens store nothing.

    `arrays` are the state's parts in memory order; the first dimension of each is divided among tensor-parallel ranks,
    at most `max_shards` of them (its head count). The dtypes are the model's own, whatever the KV cache dtype is.
    """

    kind: ClassVar[Kind] = Kind.RECURRENT_STATE

    arrays: tuple[Component, ...]
    max_shards: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.arrays, tuple) or not self.arrays:
            raise ConfigError(f"arrays of a recurrent_state layer must be a tuple of at least one, not {self.arrays!r}")
        _require_positive(self, max_shards=self.max_shards)
        names = [array.name for array in self.arrays]
        if len(set(names)) < len(names):
            raise ConfigError(f"arrays of a recurrent_state layer must have names of their own, not {names}")
        for array in self.arrays:
            if not array.shape:
                raise ConfigError(f"array {array.name!r} of a recurrent_state layer has no dimensions")
            bytes_of(array.dtype)
            _require_positive(self, **{f"{array.name}[{i}]": size for i, size in enumerate(array.shape)})

    def components(self) -> tuple[Component, ...]:
        return self.arrays

    @property
    def bytes_per_token(self) -> int:
        return 0

    @property
    def state_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays)

    def needed(self, num_tokens: npt.ArrayLike) -> Needed:
        """No token is read again: `first == stop`. The one state is counted by `state_bytes`."""
        stop = np.asarray(num_tokens, dtype=np.int64)
        return Needed(np.zeros_like(stop), stop, stop)

    def shard(self, tp_size: int) -> Self:
        """The first dimension of every array is divided among the ranks."""
        if self.max_shards % tp_size or gcd(*(array.shape[0] for array in self.arrays)) % tp_size:
            raise ConfigError(
                f"a recurrent state of {self.max_shards} head shards cannot be divided by tp_size {tp_size}"
            )
        arrays = tuple(array._replace(shape=(array.shape[0] // tp_size, *array.shape[1:])) for array in self.arrays)
        return replace(self, arrays=arrays, max_shards=self.max_shards // tp_size)

    def with_dtype(self, dtype: str) -> Self:
        return self

    @property
    def label(self) -> str:
        parts = ", ".join(f"{a.name} {'×'.join(map(str, a.shape))} {a.dtype}" for a in self.arrays)
        return f"state {parts}"
