"""Layouts written out in YAML: the schema, the layer pattern, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.kvcache import (
    MLA,
    ChunkedLocal,
    Component,
    ConfigError,
    CrossAttention,
    FullAttention,
    ModelLayout,
    RecurrentState,
    SinkWindow,
    SlidingWindow,
    SlidingWindowMLA,
    Source,
)
from kvtide.kvcache.layer_pattern import expand

EVERY_KIND = """
name: zoo
max_model_len: 32768
dtype: fp8
notes: [made up]
specs:
  full: {kind: full_attention, num_kv_heads: 8, head_dim: 128}
  wide: {kind: full_attention, num_kv_heads: 4, head_dim: 192, head_dim_v: 128, dtype: bfloat16}
  local: {kind: sliding_window, num_kv_heads: 8, head_dim: 64, window: 1024}
  chunk: {kind: chunked_local, num_kv_heads: 8, head_dim: 64, chunk: 8192}
  image: {kind: cross_attention, num_kv_heads: 8, head_dim: 64}
  sink: {kind: sink_window, num_kv_heads: 8, head_dim: 64, window: 512, sinks: 4}
  latent: {kind: mla, kv_lora_rank: 512, rope_dim: 64, index_head_dim: 128, dtype: fp8_ds_mla}
  near: {kind: sliding_window_mla, kv_lora_rank: 512, rope_dim: 64, window: 256}
  state:
    kind: recurrent_state
    max_shards: 4
    arrays: [{name: conv, shape: [8, 3], dtype: bfloat16}, {name: ssm, shape: [8, 16]}]
layers: full, wide, local, chunk, image, sink, latent, near, state, none, @local
draft: 2*full
"""
SMALL: dict[str, Any] = {
    "name": "small",
    "specs": {"full": {"kind": "full_attention", "num_kv_heads": 2, "head_dim": 64}},
    "layers": "3*full",
}


def refused(data: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        ModelLayout.from_yaml(data)
    text = str(error.value)
    assert expected in text
    assert "\n" not in text
    assert len(text) < 500


def test_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "zoo.yaml"
    path.write_text(EVERY_KIND)
    layout = ModelLayout.from_yaml(path)
    fp8 = "float8_e4m3"
    assert [layer.spec for layer in layout.layers] == [
        FullAttention(8, 128, 128, fp8),
        FullAttention(4, 192, 128, "bfloat16"),
        SlidingWindow(8, 64, 64, fp8, window=1024),
        ChunkedLocal(8, 64, 64, fp8, chunk=8192),
        CrossAttention(8, 64, 64, fp8),
        SinkWindow(8, 64, 64, fp8, window=512, sinks=4),
        MLA(512, 64, "fp8_ds_mla", index_head_dim=128),
        SlidingWindowMLA(512, 64, fp8, window=256),
        RecurrentState((Component("conv", (8, 3), "bfloat16"), Component("ssm", (8, 16), fp8)), max_shards=4),
        None,
        None,
    ]
    assert [layer.shares for layer in layout.layers] == [None] * 10 + [2]
    assert layout.draft_specs == (FullAttention(8, 128, 128, fp8),) * 2
    assert (layout.name, layout.max_model_len, layout.notes) == ("zoo", 32768, ("made up",))
    assert Source("draft", "2*full", "zoo.yaml: draft") in layout.sources


def test_mapping_and_defaults(tmp_path: Path) -> None:
    layout = ModelLayout.from_yaml(SMALL)
    assert [layer.spec for layer in layout.layers] == [FullAttention(2, 64, 64, "bfloat16")] * 3
    assert (layout.max_model_len, layout.draft_specs, layout.notes) == (None, (), ())
    path = tmp_path / "nameless.yaml"
    path.write_text("specs: {a: {kind: mla, kv_lora_rank: 4, rope_dim: 2}}\nlayers: a\n")
    assert ModelLayout.from_yaml(path).name == "nameless"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: [1, 2\nlayers: x", "bad.yaml, line 2: not YAML"),
        ("a: 1\n\tb: 2", "bad.yaml, line 2: not YAML"),
        ("", "bad.yaml is empty"),
        ("- 1\n- 2", "holds a list of 2 entries, not a YAML object"),
        ("just text", "holds 'just text', not a YAML object"),
        ("when: 2001-99-99", "is not YAML"),
        ("x: !!python/object:os.system {}", "line 1: not YAML"),
        ("1: 2", "has the key 1; every key must be text"),
        ("[" * 5000, "bad.yaml"),
    ],
)
def test_broken_yaml_names_the_file_and_the_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    refused(path, expected)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"layer": "full"}, "layer is not a known key; allowed: name, max_model_len, dtype, specs, layers"),
        ({"name": 3}, "name is 3; it must be text"),
        ({"max_model_len": 0}, "max_model_len is 0; it must be a whole number from 1"),
        ({"max_model_len": True}, "max_model_len is True"),
        ({"dtype": "float7"}, "dtype: KV cache dtype 'float7' is not known"),
        ({"dtype": 16}, "dtype is 16; it must be the name of a dtype"),
        ({"specs": {}}, "specs is an object of 0 keys; it must map labels to layer specs"),
        ({"specs": None}, "specs is null"),
        ({"specs": {"none": {}}}, "specs has the label 'none'"),
        ({"specs": {"a b": {}}}, "specs has the label 'a b'"),
        ({"specs": {3: {}}}, "specs has the label 3"),
        ({"layers": None}, "layers is null; it must be a pattern"),
        ({"layers": ["full"]}, "layers is a list of 1 entries; it must be a pattern"),
        ({"layers": "full, half"}, "layers names 'half', which specs does not have (full, none)"),
        ({"layers": "@full, full"}, "layer 0 is '@full', but no full layer comes before it"),
        ({"layers": "none"}, "has no layer that stores KV"),
        ({"draft": "@full"}, "draft names '@full'"),
        ({"notes": "x"}, "notes is 'x'; it must be a list of texts"),
    ],
)
def test_bad_top_level_values(change: dict[str, Any], expected: str) -> None:
    refused({**SMALL, **change}, expected)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("full", "specs.a is 'full'; it must be an object with a kind"),
        ({}, "specs.a.kind is null; it must be one of full_attention, sliding_window"),
        ({"kind": "causal"}, "specs.a.kind is 'causal'"),
        ({"kind": "full_attention", "num_kv_heads": 2}, "specs.a.head_dim is missing; a full_attention layer needs it"),
        ({"kind": "sliding_window", "num_kv_heads": 2, "head_dim": 4}, "specs.a.window is missing"),
        (
            {"kind": "full_attention", "num_kv_heads": 2, "head_dim": 4, "window": 9},
            "specs.a.window is not a known key; allowed: kind, num_kv_heads, head_dim, head_dim_v, dtype",
        ),
        ({"kind": "full_attention", "num_kv_heads": "2", "head_dim": 4}, "specs.a.num_kv_heads is '2'"),
        ({"kind": "full_attention", "num_kv_heads": 2, "head_dim": -4}, "specs.a.head_dim is -4"),
        ({"kind": "full_attention", "num_kv_heads": 2, "head_dim": 4, "dtype": "x"}, "specs.a.dtype: KV cache dtype"),
        (
            {"kind": "full_attention", "num_kv_heads": 2, "head_dim": 4, "dtype": "fp8_ds_mla"},
            "specs.a: KV cache dtype 'fp8_ds_mla' packs MLA latents",
        ),
        ({"kind": "mla", "kv_lora_rank": 512, "rope_dim": 64, "index_head_dim": 100}, "specs.a: index_head_dim 100"),
        ({"kind": "recurrent_state", "arrays": []}, "specs.a.arrays is a list of 0 entries"),
        ({"kind": "recurrent_state", "arrays": [3]}, "specs.a.arrays[0] is 3"),
        ({"kind": "recurrent_state", "arrays": [{"name": "x", "shape": []}]}, "specs.a.arrays[0].shape is a list of 0"),
        ({"kind": "recurrent_state", "arrays": [{"name": "x", "shape": [0]}]}, "specs.a.arrays[0].shape[0] is 0"),
        ({"kind": "recurrent_state", "arrays": [{"shape": [1]}]}, "specs.a.arrays[0].name is null"),
        (
            {"kind": "recurrent_state", "arrays": [{"name": "x", "shape": [1], "dtype": "fp8_ds_mla"}]},
            "specs.a.arrays[0].dtype is 'fp8_ds_mla'; it must be one of float32",
        ),
        (
            {"kind": "recurrent_state", "arrays": [{"name": "x", "size": 1}]},
            "specs.a.arrays[0].size is not a known key",
        ),
    ],
)
def test_bad_specs(spec: Any, expected: str) -> None:
    refused({"name": "x", "specs": {"a": spec}, "layers": "a"}, expected)


# ---- the pattern ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a", "a"),
        ("a, b", "a b"),
        ("3*a", "a a a"),
        (" 2 * ( 2*a , b ) , c ", "a a b a a b c"),
        ("2*(a, 2*(b, c))", "a b c b c a b c b c"),
        ("(a)", "a"),
        ("a-1.x, @a-1.x, none", "a-1.x @a-1.x none"),
    ],
)
def test_patterns(pattern: str, words: str) -> None:
    assert expand(pattern, "layers") == tuple(words.split())


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("", "a label or a parenthesis is missing"),
        ("a,", "a label or a parenthesis is missing"),
        ("3*", "a label or a parenthesis is missing"),
        ("a b", "a comma is missing before 'b'"),
        ("a)", "a parenthesis closes that was never opened"),
        ("(a", "a parenthesis is not closed"),
        ("a + b", "'+ b' is not expected"),
        ("0*a", "it must give 1 to 10000 layers"),
        ("10001*a", "it must give 1 to 10000 layers"),
        ("9999*(9999*(9999*a))", "it must give 1 to 10000 layers"),
        ("9" * 5000 + "*a", "it must give 1 to 10000 layers"),
        ("(" * 5000 + "a" + ")" * 5000, "parentheses are nested deeper than 16"),
    ],
)
def test_bad_patterns(pattern: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        expand(pattern, "layers")
    assert reason in str(error.value)
    assert "layers is " in str(error.value)


@st.composite
def patterns(draw: st.DrawFn, depth: int = 3) -> tuple[str, list[str]]:
    """A pattern, and the words that it means."""
    entries, words = [], []
    for _ in range(draw(st.integers(1, 3))):
        if depth and draw(st.booleans()):
            inner, meant = draw(patterns(depth=depth - 1))
            text = f"({inner})"
        else:
            text = draw(st.sampled_from(["a", "b", "@a", "none"]))
            meant = [text]
        count = draw(st.integers(1, 3))
        entries.append(text if count == 1 else f"{count}*{text}")
        words += meant * count
    return ", ".join(entries), words


@given(patterns())
def test_pattern_means_what_it_was_built_from(pair: tuple[str, list[str]]) -> None:
    pattern, words = pair
    assert expand(pattern, "layers") == tuple(words)


@given(st.text(alphabet="ab@*(), 0123none", max_size=30))
def test_any_text_is_a_pattern_or_a_config_error(text: str) -> None:
    try:
        words = expand(text, "layers")
    except ConfigError:
        return
    assert 1 <= len(words) <= 10_000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def read_or_refuse(data: Any) -> ModelLayout | None:
    try:
        return ModelLayout.from_yaml(data)
    except ConfigError as error:
        text = str(error)
    assert "\n" not in text
    return None


@given(st.sampled_from(["name", "max_model_len", "dtype", "specs", "layers", "draft", "notes"]), json_values)
def test_any_value_gives_a_layout_or_a_config_error(key: str, value: Any) -> None:
    layout = read_or_refuse({**SMALL, key: value})
    assert layout is None or len(layout.layers) >= 1


@given(st.sampled_from(["kind", "num_kv_heads", "head_dim", "head_dim_v", "dtype", "arrays", "window"]), json_values)
def test_any_spec_value_gives_a_layout_or_a_config_error(key: str, value: Any) -> None:
    layout = read_or_refuse({**SMALL, "specs": {"full": {**SMALL["specs"]["full"], key: value}}})
    assert layout is None or layout.bytes_per_token > 0


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("#" * (2**20 + 1))
    with pytest.raises(ConfigError, match="is larger than 1048576 bytes; a YAML config is not"):
        ModelLayout.from_yaml(path)
