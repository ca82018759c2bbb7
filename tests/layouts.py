"""Layouts and oracles that several tests use: real models written out by hand, random small ones, and who sees whom.

The models are typed in from their published dimensions, not read from presets, so that a wrong preset cannot hide a
wrong figure.
"""

from __future__ import annotations

from hypothesis import strategies as st

from kvtide.kvcache import (
    MLA,
    ChunkedLocal,
    Component,
    CrossAttention,
    FullAttention,
    Layer,
    LayerSpec,
    ModelLayout,
    RecurrentState,
    SinkWindow,
    SlidingWindow,
    SlidingWindowMLA,
)


def layout_of(name: str, *groups: tuple[int, LayerSpec]) -> ModelLayout:
    """A layout of `(number of layers, spec)` runs, numbered from 0."""
    specs = [spec for count, spec in groups for _ in range(count)]
    return ModelLayout(name, tuple(Layer(i, spec) for i, spec in enumerate(specs)))


def gated_delta_net(key_heads: int, value_heads: int, ssm_dtype: str) -> RecurrentState:
    """Qwen's linear attention: a convolution of 4 taps (3 kept), and one 128 x 128 matrix per value head."""
    channels = (2 * key_heads + value_heads) * 128
    arrays = (
        Component("conv", (channels, 3), "bfloat16"),
        Component("ssm", (value_heads, 128, 128), ssm_dtype),
    )
    return RecurrentState(arrays, max_shards=key_heads)


def mamba(channels: int, ssm_dtype: str) -> RecurrentState:
    """Mamba-1 with 4 taps (3 kept) and a state of 16 values per channel."""
    arrays = (Component("conv", (channels, 3), "bfloat16"), Component("ssm", (channels, 16), ssm_dtype))
    return RecurrentState(arrays, max_shards=channels)


def gemma_3_4b() -> ModelLayout:
    return layout_of("gemma-3-4b", (5, FullAttention(4, 256, 256)), (29, SlidingWindow(4, 256, 256, window=1024)))


def gemma_3_12b() -> ModelLayout:
    return layout_of("gemma-3-12b", (8, FullAttention(8, 256, 256)), (40, SlidingWindow(8, 256, 256, window=1024)))


def gemma_3_27b() -> ModelLayout:
    return layout_of("gemma-3-27b", (10, FullAttention(16, 128, 128)), (52, SlidingWindow(16, 128, 128, window=1024)))


def mimo_v2_flash() -> ModelLayout:
    return layout_of("mimo-v2-flash", (9, FullAttention(4, 192, 128)), (39, SlidingWindow(8, 192, 128, window=128)))


def step_3_5() -> ModelLayout:
    return layout_of("step-3.5-flash", (12, FullAttention(8, 128, 128)), (33, SlidingWindow(8, 128, 128, window=512)))


def qwen_3_5_27b() -> ModelLayout:
    return layout_of("qwen3.5-27b", (48, gated_delta_net(16, 48, "float32")), (16, FullAttention(4, 256, 256)))


def mllama_11b() -> ModelLayout:
    return layout_of("mllama-11b", (32, FullAttention(8, 128, 128)), (8, CrossAttention(8, 128, 128)))


def deepseek_v3_2(dtype: str) -> ModelLayout:
    return layout_of("deepseek-v3.2", (61, MLA(512, 64, dtype, index_head_dim=128)))


def sees(spec: LayerSpec, query: int, key: int) -> bool:
    """Whether the token at `query` attends to the one at `key`: the masks, as the papers write them."""
    if key > query or isinstance(spec, RecurrentState):
        return False
    if isinstance(spec, SinkWindow):
        return key < spec.sinks or query - key < spec.window
    if isinstance(spec, SlidingWindow | SlidingWindowMLA):
        return query - key < spec.window
    if isinstance(spec, ChunkedLocal):
        return key // spec.chunk == query // spec.chunk
    return True


_heads = st.integers(1, 3)
_dims = st.integers(1, 5)
_dtypes = st.sampled_from(["bfloat16", "float32", "float8_e4m3"])


def attention_specs(reach: st.SearchStrategy[int]) -> st.SearchStrategy[LayerSpec]:
    """Every kind of attention, small in bytes; `reach` gives windows, chunks and sinks."""
    return st.one_of(
        st.builds(FullAttention, _heads, _dims, _dims, _dtypes),
        st.builds(CrossAttention, _heads, _dims, _dims, _dtypes),
        st.builds(SlidingWindow, _heads, _dims, _dims, _dtypes, window=reach),
        st.builds(SinkWindow, _heads, _dims, _dims, _dtypes, window=reach, sinks=reach),
        st.builds(ChunkedLocal, _heads, _dims, _dims, _dtypes, chunk=reach),
        st.builds(MLA, st.integers(1, 8), _dims, _dtypes, st.sampled_from([0, 128])),
        st.builds(SlidingWindowMLA, st.integers(1, 8), _dims, _dtypes, window=reach),
    )


def state_specs(rows: int = 5, columns: int = 5) -> st.SearchStrategy[LayerSpec]:
    """Recurrent states of one or two small arrays, each of at most `rows` x `columns` values."""
    shape = st.tuples(st.integers(1, rows), st.integers(1, columns))
    array = st.builds(Component, st.sampled_from("ab"), shape, _dtypes)
    return st.lists(array, min_size=1, max_size=2, unique_by=lambda a: a.name).map(lambda a: RecurrentState(tuple(a)))
