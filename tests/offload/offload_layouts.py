"""Small models of every kind that offload meets."""

from __future__ import annotations

from layouts import layout_of

from kvtide.kvcache import (
    MLA,
    ChunkedLocal,
    Component,
    CrossAttention,
    FullAttention,
    RecurrentState,
    SinkWindow,
    SlidingWindow,
    SlidingWindowMLA,
)

STATE = RecurrentState((Component("conv", (2, 4), "float32"), Component("ssm", (2, 8), "float32")), max_shards=2)
LAYOUTS = {
    "full": layout_of("full", (3, FullAttention(1, 16, 16))),
    "gemma": layout_of("gemma", (2, FullAttention(1, 16, 16)), (5, SlidingWindow(1, 16, 16, window=40))),
    "latents": layout_of("mla", (2, MLA(32, 16, "float16")), (3, SlidingWindowMLA(32, 16, "float16", window=50))),
    "sinks": layout_of("sinks", (2, FullAttention(1, 16, 16)), (2, SinkWindow(1, 16, 16, window=33, sinks=4))),
    "chunks": layout_of("chunks", (1, FullAttention(1, 16, 16)), (3, ChunkedLocal(1, 16, 16, chunk=64))),
    "states": layout_of("states", (1, FullAttention(1, 16, 16)), (3, STATE)),
    "state only": layout_of("state-only", (2, STATE)),
    "images": layout_of("images", (2, FullAttention(1, 16, 16)), (1, CrossAttention(1, 16, 16))),
}
