"""Layouts: how layers form groups, and what narrowing (dtype, drafts, pipeline stage, tensor parallelism) leaves."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from layouts import deepseek_v3_2, gated_delta_net, gemma_3_27b, layout_of, mllama_11b, qwen_3_5_27b

from kvtide.kvcache import (
    MLA,
    ConfigError,
    CrossAttention,
    FullAttention,
    Group,
    Layer,
    ModelLayout,
    SlidingWindow,
)

FULL = FullAttention(8, 128, 128)
NEAR = SlidingWindow(8, 128, 128, window=1024)
FAR = SlidingWindow(8, 128, 128, window=4096)


def interleaved() -> ModelLayout:
    specs = [NEAR, FAR, FULL, NEAR, FULL, NEAR]
    return ModelLayout("mix", tuple(Layer(i, spec) for i, spec in enumerate(specs)))


class TestGroups:
    def test_equal_specs_form_one_group_in_order_of_first_layers(self) -> None:
        assert interleaved().groups == (
            Group("sliding_window", NEAR, (0, 3, 5)),
            Group("sliding_window_2", FAR, (1,)),
            Group("full_attention", FULL, (2, 4)),
        )

    def test_group_bytes(self) -> None:
        near, far, full = interleaved().groups
        assert (near.bytes_per_token, far.bytes_per_token, full.bytes_per_token) == (3 * 4096, 4096, 2 * 4096)
        assert near.state_bytes == 0
        assert interleaved().bytes_per_token == 6 * 4096
        assert gemma_3_27b().bytes_per_token == 507904

    def test_states(self) -> None:
        layout = qwen_3_5_27b()
        states, full = layout.groups
        assert states.state_bytes == layout.state_bytes == 48 * 3207168
        assert states.bytes_per_token == full.state_bytes == 0
        assert layout.bytes_per_token == full.bytes_per_token == 16 * 4096

    def test_shared_and_empty_layers_store_nothing(self) -> None:
        """Gemma-3n: the last layers read the KV of an earlier layer of their kind."""
        layers = (Layer(0, NEAR), Layer(1, FULL), Layer(2, None, shares=0), Layer(3, None, shares=1), Layer(4, None))
        layout = ModelLayout("shared", layers)
        assert [group.layers for group in layout.groups] == [(0,), (1,)]
        assert layout.bytes_per_token == 2 * 4096

    def test_a_model_without_kv_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match="model 'empty' has no layer that stores KV"):
            ModelLayout("empty", ())
        with pytest.raises(ConfigError, match="model 'hollow' has no layer that stores KV"):
            ModelLayout("hollow", (Layer(0, None), Layer(1, None, shares=0)))

    def test_cross_attention(self) -> None:
        assert mllama_11b().has_cross_attention
        assert not gemma_3_27b().has_cross_attention

    def test_layouts_are_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            gemma_3_27b().name = "other"  # type: ignore[misc]


class TestDtype:
    def test_auto_changes_nothing(self) -> None:
        assert gemma_3_27b().with_dtype("auto") == gemma_3_27b()

    def test_fp8_halves_attention_and_leaves_states(self) -> None:
        layout = qwen_3_5_27b()
        narrow = layout.with_dtype("fp8")
        assert narrow.bytes_per_token * 2 == layout.bytes_per_token
        assert narrow.state_bytes == layout.state_bytes

    def test_shared_layers_survive(self) -> None:
        layout = ModelLayout("shared", (Layer(0, FULL), Layer(1, None, shares=0)))
        assert layout.with_dtype("fp8").layers[1] == Layer(1, None, shares=0)

    def test_packed_latents(self) -> None:
        narrow = deepseek_v3_2("bfloat16").with_dtype("fp8_ds_mla")
        assert narrow == deepseek_v3_2("fp8_ds_mla")
        assert narrow.bytes_per_token == 61 * (656 + 132)

    def test_packed_latents_next_to_states(self) -> None:
        layout = layout_of("kimi-linear", (3, gated_delta_net(16, 32, "float32")), (1, MLA(512, 64)))
        assert layout.with_dtype("fp8_ds_mla").bytes_per_token == 656

    def test_draft_specs_change_too(self) -> None:
        layout = ModelLayout("mtp", (Layer(0, FULL),), draft_specs=(FULL,)).with_dtype("fp8")
        assert layout.with_draft().bytes_per_token == 2 * 2048

    def test_packed_latents_need_latents(self) -> None:
        with pytest.raises(ConfigError, match="'fp8_ds_mla' packs MLA latents; gemma-3-27b has no MLA layer"):
            gemma_3_27b().with_dtype("fp8_ds_mla")

    def test_unknown(self) -> None:
        with pytest.raises(ConfigError, match="'fp6' is not known"):
            gemma_3_27b().with_dtype("fp6")


class TestDraft:
    def test_given_layers_come_after_all_others(self) -> None:
        layout = layout_of("base", (2, FULL)).with_draft([FULL, NEAR])
        assert layout.layers[2:] == (Layer(2, FULL, draft=True), Layer(3, NEAR, draft=True))
        assert [group.layers for group in layout.groups] == [(0, 1, 2), (3,)]

    def test_the_models_own_modules_are_added_once(self) -> None:
        layout = ModelLayout("mtp", (Layer(0, FULL), Layer(5, None)), draft_specs=(NEAR,)).with_draft()
        assert layout.layers[-1] == Layer(6, NEAR, draft=True)
        with pytest.raises(ConfigError, match="mtp declares no multi-token-prediction layers"):
            layout.with_draft()

    def test_none_declared(self) -> None:
        with pytest.raises(ConfigError, match="gemma-3-27b declares no multi-token-prediction layers; give the draft"):
            gemma_3_27b().with_draft()
        with pytest.raises(ConfigError, match="give the draft layers"):
            gemma_3_27b().with_draft([])


class TestStage:
    def test_stages_partition_the_model(self) -> None:
        layout = gemma_3_27b()
        parts = [layout.stage(0, 20), layout.stage(20, 62)]
        assert tuple(layer for part in parts for layer in part.layers) == layout.layers
        assert sum(part.bytes_per_token for part in parts) == layout.bytes_per_token

    @pytest.mark.parametrize(("first", "last"), [(3, 3), (4, 3), (-1, 3)])
    def test_empty_or_negative(self, first: int, last: int) -> None:
        with pytest.raises(ConfigError, match=rf"pipeline stage \[{first}, {last}\) of mix is empty or negative"):
            interleaved().stage(first, last)

    def test_a_stage_beyond_the_model(self) -> None:
        with pytest.raises(ConfigError, match="has no layer that stores KV"):
            interleaved().stage(6, 9)

    def test_a_stage_must_hold_what_its_layers_share(self) -> None:
        layout = ModelLayout("shared", (Layer(0, NEAR), Layer(1, FULL), Layer(2, None, shares=0)))
        assert layout.stage(0, 3) == layout
        with pytest.raises(ConfigError, match=r"layer 2 of shared reads the KV of layer 0; stage \[1, 3\) must hold"):
            layout.stage(1, 3)


class TestShard:
    def test_every_layer_is_sharded(self) -> None:
        half = qwen_3_5_27b().shard(2)
        assert half.tp_size == 2
        assert half.state_bytes * 2 == qwen_3_5_27b().state_bytes
        assert half.bytes_per_token * 2 == qwen_3_5_27b().bytes_per_token

    def test_draft_specs_too(self) -> None:
        layout = ModelLayout("mtp", (Layer(0, FULL),), draft_specs=(FULL,)).shard(8).with_draft()
        assert layout.bytes_per_token == 2 * 512

    def test_cross_attention_and_latents(self) -> None:
        assert mllama_11b().shard(8).groups[1].spec == CrossAttention(1, 128, 128)
        assert deepseek_v3_2("bfloat16").shard(8).bytes_per_token == deepseek_v3_2("bfloat16").bytes_per_token

    @pytest.mark.parametrize("tp_size", [0, -2])
    def test_bad_sizes(self, tp_size: int) -> None:
        with pytest.raises(ConfigError, match=f"tp_size {tp_size} must be at least 1"):
            gemma_3_27b().shard(tp_size)

    def test_twice(self) -> None:
        with pytest.raises(ConfigError, match="gemma-3-27b is sharded 4 ways already"):
            gemma_3_27b().shard(4).shard(2)

    def test_heads_that_do_not_divide(self) -> None:
        with pytest.raises(ConfigError, match="16 KV heads cannot be divided among tp_size 3"):
            gemma_3_27b().shard(3)


class TestWrongLayouts:
    def test_equal_indices(self) -> None:
        spec = FullAttention(1, 8, 8)
        with pytest.raises(ConfigError, match="same index"):
            ModelLayout("twice", (Layer(0, spec), Layer(0, spec)))

    @pytest.mark.parametrize("target", [1, 2, 7])
    def test_sharing_with_a_layer_that_stores_nothing(self, target: int) -> None:
        layers = (Layer(0, FullAttention(1, 8, 8)), Layer(1, None, shares=target), Layer(2, None, shares=0))
        with pytest.raises(ConfigError, match=f"share the KV of layer {target}"):
            ModelLayout("shared", layers)

    def test_drafts_go_with_the_last_stage(self) -> None:
        spec = FullAttention(1, 8, 8)
        layout = ModelLayout("drafted", tuple(Layer(i, spec) for i in range(4)), draft_specs=(spec,))
        with pytest.raises(ConfigError, match="declares no multi-token-prediction"):
            layout.stage(0, 2).with_draft()
        assert [layer.index for layer in layout.stage(2, 4).with_draft().layers] == [2, 3, 4]

    def test_packed_formats_leave_other_layers_alone(self) -> None:
        full = FullAttention(1, 8, 8)
        layout = ModelLayout("mixed", (Layer(0, MLA(512, 64)), Layer(1, full))).with_dtype("fp8_ds_mla")
        assert [group.spec.bytes_per_token for group in layout.groups] == [656, full.bytes_per_token]

    def test_an_eagle_head_looks_like_full_attention(self) -> None:
        full, window = FullAttention(2, 8, 8), SlidingWindow(1, 8, 8, window=4)
        assert ModelLayout("two", (Layer(0, window), Layer(1, full))).eagle_spec() == full
        with pytest.raises(ConfigError, match="EAGLE"):
            ModelLayout("windows", (Layer(0, window),)).eagle_spec()
