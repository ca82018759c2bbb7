"""Layer specs: reach against the masks written out, bytes against published sizes, sharding, bad values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import attention_specs, gated_delta_net, mamba, sees, state_specs

from kvtide.kvcache import (
    MLA,
    ChunkedLocal,
    Component,
    ConfigError,
    CrossAttention,
    FullAttention,
    Kind,
    LayerSpec,
    RecurrentState,
    SinkWindow,
    SlidingWindow,
    SlidingWindowMLA,
)
from kvtide.kvcache.dtypes import ELEMENT_BYTES, bytes_of, canonical_dtype, packed_latent_bytes

ONE_OF_EACH = {
    Kind.FULL_ATTENTION: FullAttention(2, 8, 4),
    Kind.CROSS_ATTENTION: CrossAttention(2, 8, 4),
    Kind.SLIDING_WINDOW: SlidingWindow(2, 8, 4, window=7),
    Kind.SINK_WINDOW: SinkWindow(2, 8, 4, window=7, sinks=3),
    Kind.CHUNKED_LOCAL: ChunkedLocal(2, 8, 4, chunk=7),
    Kind.MLA: MLA(512, 64),
    Kind.SLIDING_WINDOW_MLA: SlidingWindowMLA(512, 64, window=7),
    Kind.RECURRENT_STATE: RecurrentState((Component("ssm", (4, 8), "float32"),), max_shards=4),
}
BOUNDED = {Kind.SLIDING_WINDOW, Kind.SINK_WINDOW, Kind.CHUNKED_LOCAL, Kind.SLIDING_WINDOW_MLA}


def visible(spec: LayerSpec, num_tokens: int) -> set[int]:
    return {key for key in range(num_tokens) if sees(spec, num_tokens - 1, key)}


def test_every_kind_is_in_the_table() -> None:
    assert set(ONE_OF_EACH) == set(Kind)
    assert all(spec.kind is kind for kind, spec in ONE_OF_EACH.items())


class TestReach:
    @given(spec=st.one_of(attention_specs(st.integers(1, 12)), state_specs()), most=st.integers(0, 60))
    def test_needed_is_what_the_mask_shows(self, spec: LayerSpec, most: int) -> None:
        lengths = np.arange(most + 1)
        sinks, first, stop = spec.needed(lengths)
        for n in range(most + 1):
            kept = set(range(sinks[n])) | set(range(first[n], stop[n]))
            assert kept == visible(spec, n)
            assert spec.needed(lengths).num_tokens[n] == len(kept)

    @pytest.mark.parametrize("spec", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
    def test_the_two_parts_never_overlap(self, spec: LayerSpec) -> None:
        sinks, first, stop = spec.needed(np.arange(100))
        assert (sinks >= 0).all()
        assert (sinks <= first).all()
        assert (first <= stop).all()

    @pytest.mark.parametrize("spec", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
    def test_numbers_lists_and_arrays_of_any_shape_agree(self, spec: LayerSpec) -> None:
        lengths = np.arange(60, dtype=np.int32).reshape(4, 15)
        table = spec.needed(lengths)
        assert spec.needed(lengths.tolist()).first.tolist() == table.first.tolist()
        for field in (*table, table.num_tokens):
            assert field.shape == (4, 15)
            assert field.dtype == np.int64
        for i, j in np.ndindex(4, 15):
            one = spec.needed(int(lengths[i, j]))
            assert [int(x) for x in one] == [int(x[i, j]) for x in table]

    def test_arrays_larger_than_int32_are_counted_right(self) -> None:
        assert SlidingWindow(1, 1, 1, window=1024).needed(2**40).first == 2**40 - 1024
        assert ChunkedLocal(1, 1, 1, chunk=8192).needed(2**40 + 1).first == 2**40

    @pytest.mark.parametrize("window", [1, 2, 5, 128])
    def test_what_must_be_held_with_c_committed_tokens_starts_at_c_minus_window_plus_1(self, window: int) -> None:
        """The next query is at c: a manager may not slide past `c - window + 1`, or rejected drafts lose tokens."""
        for spec in (SlidingWindow(1, 1, 1, window=window), SlidingWindowMLA(8, 1, window=window)):
            for committed in range(3 * window + 3):
                held = spec.needed(committed + 1)
                assert held.first == max(committed - window + 1, 0)
                # The query's own slot is not committed yet.
                assert min(int(held.first), committed) == min(visible(spec, committed + 1) | {committed})

    @given(spec=attention_specs(st.integers(1, 12)))
    def test_what_goes_out_of_reach_never_comes_back(self, spec: LayerSpec) -> None:
        dead: set[int] = set()
        for n in range(80):
            now = visible(spec, n)
            assert not now & dead
            dead |= set(range(n)) - now

    @pytest.mark.parametrize(("kind", "spec"), ONE_OF_EACH.items(), ids=ONE_OF_EACH)
    def test_bounded_reach_and_images(self, kind: Kind, spec: LayerSpec) -> None:
        assert spec.has_bounded_reach == (kind in BOUNDED)
        assert spec.per_image == (kind is Kind.CROSS_ATTENTION)


class TestBytes:
    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            (FullAttention(16, 128, 128), 8192),  # Gemma-3-27B
            (FullAttention(4, 192, 128), 2560),  # MiMo-V2-Flash, full: K and V of different width
            (SlidingWindow(8, 192, 128, window=128), 5120),  # MiMo-V2-Flash, window
            (FullAttention(8, 64, 64), 2048),  # gpt-oss
            (FullAttention(8, 128, 128, "float8_e4m3"), 2048),
            (FullAttention(8, 128, 128, "float8_e5m2"), 2048),
            (FullAttention(8, 128, 64, "float32"), 6144),
            (MLA(512, 64), 1152),
            (MLA(512, 64, "float8_e4m3"), 576),
            (MLA(512, 64, "fp8_ds_mla"), 656),
            (MLA(512, 64, "nvfp4_ds_mla"), 352),
            (MLA(512, 64, index_head_dim=128), 1152 + 132),
            (MLA(512, 64, "fp8_ds_mla", index_head_dim=128), 656 + 132),
            (SlidingWindowMLA(512, 64, "fp8_ds_mla", index_head_dim=256, window=9), 656 + 264),
        ],
    )
    def test_bytes_per_token(self, spec: LayerSpec, expected: int) -> None:
        assert spec.bytes_per_token == expected
        assert spec.state_bytes == 0

    def test_components_lie_in_the_order_k_v(self) -> None:
        assert FullAttention(4, 192, 128).components() == (
            Component("k", (4, 192), "bfloat16"),
            Component("v", (4, 128), "bfloat16"),
        )

    def test_a_packed_latent_is_bytes_and_the_indexer_ignores_the_dtype(self) -> None:
        indexer = Component("indexer", (132,), "uint8")
        assert MLA(512, 64, "fp8_ds_mla", 128).components() == (Component("latent", (656,), "uint8"), indexer)
        assert MLA(512, 64, "bfloat16", 128).components() == (Component("latent", (576,), "bfloat16"), indexer)

    @pytest.mark.parametrize(
        ("spec", "conv", "ssm"),
        [
            (gated_delta_net(16, 32, "bfloat16"), 49152, 1048576),  # Qwen3-Next-80B
            (gated_delta_net(16, 32, "float32"), 49152, 2097152),  # Qwen3.5-4B, 9B, 35B-A3B
            (gated_delta_net(16, 48, "float32"), 61440, 3145728),  # Qwen3.5-27B
            (gated_delta_net(16, 64, "float32"), 73728, 4194304),  # Qwen3.5-122B, 397B
            (mamba(8192, "bfloat16"), 49152, 262144),  # Jamba-1.5-Mini
            (mamba(8192, "float32"), 49152, 524288),
        ],
    )
    def test_state_bytes(self, spec: RecurrentState, conv: int, ssm: int) -> None:
        assert [part.num_bytes for part in spec.components()] == [conv, ssm]
        assert spec.state_bytes == conv + ssm
        assert spec.bytes_per_token == 0


class TestShard:
    @pytest.mark.parametrize(
        ("heads", "tp_size", "left"),
        [(8, 1, 8), (8, 2, 4), (8, 8, 1), (8, 16, 1), (6, 3, 2), (2, 8, 1), (1, 5, 1)],
    )
    def test_kv_heads_are_divided_or_replicated(self, heads: int, tp_size: int, left: int) -> None:
        spec = SinkWindow(heads, 192, 128, "float8_e4m3", window=9, sinks=2).shard(tp_size)
        assert spec == SinkWindow(left, 192, 128, "float8_e4m3", window=9, sinks=2)

    @pytest.mark.parametrize(("heads", "tp_size"), [(8, 3), (6, 4), (4, 6), (3, 8)])
    def test_heads_that_neither_divide_nor_replicate_are_an_error(self, heads: int, tp_size: int) -> None:
        with pytest.raises(ConfigError, match=f"^{heads} KV heads cannot be divided among tp_size {tp_size}"):
            FullAttention(heads, 8, 8).shard(tp_size)

    @pytest.mark.parametrize("tp_size", [1, 2, 3, 128])
    def test_latents_are_replicated(self, tp_size: int) -> None:
        spec = SlidingWindowMLA(512, 64, "fp8_ds_mla", 128, window=9)
        assert spec.shard(tp_size) == spec

    def test_states_are_divided(self) -> None:
        whole = gated_delta_net(16, 48, "float32")
        half = whole.shard(2)
        assert [part.shape for part in half.arrays] == [(5120, 3), (24, 128, 128)]
        assert half.state_bytes * 2 == whole.state_bytes
        assert half.shard(8) == whole.shard(16)
        assert half.max_shards == 8

    @pytest.mark.parametrize("tp_size", [3, 5, 32])
    def test_a_state_that_does_not_divide_is_an_error(self, tp_size: int) -> None:
        with pytest.raises(ConfigError, match=f"16 head shards cannot be divided by tp_size {tp_size}"):
            gated_delta_net(16, 48, "float32").shard(tp_size)

    def test_a_state_is_never_cut_through_a_head(self) -> None:
        with pytest.raises(ConfigError, match="of 2 head shards cannot be divided by tp_size 4"):
            RecurrentState((Component("ssm", (8, 16), "float32"),), max_shards=2).shard(4)
        with pytest.raises(ConfigError, match="cannot be divided by tp_size 4"):
            RecurrentState((Component("conv", (6, 3), "bfloat16"),), max_shards=4).shard(4)


class TestDtypes:
    @pytest.mark.parametrize(("kind", "spec"), ONE_OF_EACH.items(), ids=ONE_OF_EACH)
    def test_with_dtype_changes_all_but_states(self, kind: Kind, spec: LayerSpec) -> None:
        changed = spec.with_dtype("float8_e4m3")
        if kind is Kind.RECURRENT_STATE:
            assert changed == spec
        else:
            assert changed.bytes_per_token * 2 == spec.bytes_per_token
            assert changed.with_dtype("bfloat16") == spec

    @pytest.mark.parametrize(
        ("name", "canonical"),
        [
            ("bf16", "bfloat16"),
            ("torch.bfloat16", "bfloat16"),
            ("half", "float16"),
            ("FP8", "float8_e4m3"),
            ("fp8_e5m2", "float8_e5m2"),
            ("float8_e4m3fn", "float8_e4m3"),
            ("fp8_ds_mla", "fp8_ds_mla"),
        ],
    )
    def test_engines_names_are_understood(self, name: str, canonical: str) -> None:
        assert canonical_dtype(name) == canonical

    def test_an_unknown_name_lists_what_is_allowed(self) -> None:
        with pytest.raises(ConfigError, match=r"'int3' is not known; allowed: float32, .*fp8_ds_mla"):
            canonical_dtype("int3")

    def test_every_element_type_has_numpys_size(self) -> None:
        for name in ("float32", "float16", "int8", "uint8"):
            assert bytes_of(name) == np.dtype(name).itemsize
        assert {n for n, size in ELEMENT_BYTES.items() if size == 1} == {"int8", "uint8", "float8_e4m3", "float8_e5m2"}

    def test_a_packed_format_has_no_element_size(self) -> None:
        with pytest.raises(ConfigError, match="'fp8_ds_mla' is a packed MLA token format"):
            bytes_of("fp8_ds_mla")

    @pytest.mark.parametrize(("dtype", "rank"), [("fp8_ds_mla", 500), ("nvfp4_ds_mla", 500)])
    def test_packed_formats_scale_whole_groups(self, dtype: str, rank: int) -> None:
        with pytest.raises(ConfigError, match=f"kv_lora_rank {rank} does not divide"):
            packed_latent_bytes(dtype, rank, 64)


class TestBadValues:
    @pytest.mark.parametrize("bad", [0, -1, True, 2.0, "8", None])
    def test_attention_dims(self, bad: object) -> None:
        for build in (
            lambda: FullAttention(bad, 8, 8),  # type: ignore[arg-type]
            lambda: FullAttention(8, bad, 8),  # type: ignore[arg-type]
            lambda: FullAttention(8, 8, bad),  # type: ignore[arg-type]
            lambda: SlidingWindow(8, 8, 8, window=bad),  # type: ignore[arg-type]
            lambda: SinkWindow(8, 8, 8, window=8, sinks=bad),  # type: ignore[arg-type]
            lambda: ChunkedLocal(8, 8, 8, chunk=bad),  # type: ignore[arg-type]
            lambda: MLA(bad, 8),  # type: ignore[arg-type]
            lambda: MLA(8, bad),  # type: ignore[arg-type]
            lambda: SlidingWindowMLA(8, 8, window=bad),  # type: ignore[arg-type]
        ):
            with pytest.raises(ConfigError) as error:
                build()
            assert f"is {bad!r}; it must be a whole number of at least 1" in str(error.value)

    def test_the_message_names_the_field_and_the_kind(self) -> None:
        with pytest.raises(ConfigError, match=r"^window of a sliding_window layer is 0;"):
            SlidingWindow(8, 8, 8, window=0)

    def test_packed_latents_outside_mla(self) -> None:
        with pytest.raises(ConfigError, match="'fp8_ds_mla' packs MLA latents; a chunked_local layer cannot use it"):
            ChunkedLocal(8, 8, 8, "fp8_ds_mla", chunk=9)

    def test_packed_latents_of_an_odd_rank(self) -> None:
        with pytest.raises(ConfigError, match="kv_lora_rank 500 does not divide"):
            MLA(500, 64, "fp8_ds_mla")

    @pytest.mark.parametrize("spec", [FullAttention, MLA])
    def test_unknown_dtypes(self, spec: type) -> None:
        with pytest.raises(ConfigError, match="'float7'"):
            spec(8, 8, *([8] if spec is FullAttention else []), dtype="float7")

    def test_indexer_dims(self) -> None:
        with pytest.raises(ConfigError, match="index_head_dim 100 must be 0 or a multiple of 128"):
            MLA(512, 64, index_head_dim=100)

    def test_states(self) -> None:
        with pytest.raises(ConfigError, match="at least one"):
            RecurrentState(())
        with pytest.raises(ConfigError, match=r"^ssm\[1\] of a recurrent_state layer is 0;"):
            RecurrentState((Component("ssm", (4, 0), "float32"),))
        with pytest.raises(ConfigError, match="'float7'"):
            RecurrentState((Component("ssm", (4, 4), "float7"),))


def test_specs_are_values_and_say_what_they_are() -> None:
    labels = {spec.label for spec in ONE_OF_EACH.values()}
    assert len(labels) == len(ONE_OF_EACH) - 1  # full and cross attention store the same
    assert FullAttention(2, 8, 4).label == "2 heads × 8/4 bfloat16"
    assert SinkWindow(2, 8, 8, window=7, sinks=3).label == "2 heads × 8 bfloat16, window 7, 3 sinks"
    assert MLA(512, 64, "fp8_ds_mla", 128).label == "latent 512+64 fp8_ds_mla + indexer 128"
    assert gated_delta_net(16, 32, "float32").label == "state conv 8192×3 bfloat16, ssm 32×128×128 float32"
    assert FullAttention(2, 8, 4) != CrossAttention(2, 8, 4)
    assert len({SlidingWindow(2, 8, 4, window=7), SlidingWindow(2, 8, 4, window=7)}) == 1


class TestWrongSpecs:
    """Values that would give wrong bytes are refused, each naming the value."""

    @pytest.mark.parametrize("dtype", ["float7", "bf16"])
    def test_unknown_element_type(self, dtype: str) -> None:
        with pytest.raises(ConfigError, match=f"{dtype}.*not known.*bfloat16"):
            FullAttention(8, 8, 8, dtype=dtype)

    @pytest.mark.parametrize("size", [-128, "128", 128.0, 100])
    def test_index_head_dim(self, size: object) -> None:
        with pytest.raises(ConfigError, match="index_head_dim"):
            MLA(512, 64, index_head_dim=size)  # type: ignore[arg-type]

    @pytest.mark.parametrize("shards", [0, -4])
    def test_max_shards(self, shards: int) -> None:
        with pytest.raises(ConfigError, match=f"max_shards.*{shards}"):
            RecurrentState((Component("a", (4,), "float32"),), max_shards=shards)

    def test_state_arrays(self) -> None:
        with pytest.raises(ConfigError, match="no dimensions"):
            RecurrentState((Component("a", (), "float32"),))
        with pytest.raises(ConfigError, match="names of their own"):
            RecurrentState((Component("a", (4,), "float32"),) * 2)
        with pytest.raises(ConfigError, match="tuple"):
            RecurrentState([Component("a", (4,), "float32")])  # type: ignore[arg-type]
