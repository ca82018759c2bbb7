"""Bundled presets: the bytes of every model in the table, the states of the recurrent ones, and how names are found."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from kvtide.kvcache import (
    MLA,
    ChunkedLocal,
    ConfigError,
    CrossAttention,
    FullAttention,
    LayerSpec,
    ModelLayout,
    RecurrentState,
    SlidingWindow,
    preset_names,
)
from kvtide.kvcache.presets import preset_summary


class Row(NamedTuple):
    """Layers as (class, count, bytes per token and layer, window or chunk); bytes per token of all, of full layers."""

    layers: tuple[tuple[type[LayerSpec], int, int, int], ...]
    bytes_per_token: int
    full_only: int
    max_model_len: int
    drafts: int = 0


def full(count: int, size: int) -> tuple[type[LayerSpec], int, int, int]:
    return FullAttention, count, size, 0


def swa(count: int, size: int, window: int) -> tuple[type[LayerSpec], int, int, int]:
    return SlidingWindow, count, size, window


def latent(count: int, size: int = 1152) -> tuple[type[LayerSpec], int, int, int]:
    return MLA, count, size, 0


def states(count: int) -> tuple[type[LayerSpec], int, int, int]:
    return RecurrentState, count, 0, 0


TABLE = {
    "llama-3.2-11b-vision": Row((full(32, 4096), (CrossAttention, 8, 4096, 0)), 163840, 131072, 131072),
    "llama-3.2-90b-vision": Row((full(80, 4096), (CrossAttention, 20, 4096, 0)), 409600, 327680, 131072),
    "ministral-8b-2410": Row((full(9, 4096), swa(27, 4096, 32768)), 147456, 36864, 131072),
    "mistral-7b-v0.1": Row((swa(32, 4096, 4096),), 131072, 0, 32768),
    "gemma-2-9b": Row((full(21, 8192), swa(21, 8192, 4096)), 344064, 172032, 8192),
    "gemma-2-27b": Row((full(23, 8192), swa(23, 8192, 4096)), 376832, 188416, 8192),
    "gemma-3-4b": Row((full(5, 4096), swa(29, 4096, 1024)), 139264, 20480, 131072),
    "gemma-3-12b": Row((full(8, 8192), swa(40, 8192, 1024)), 393216, 65536, 131072),
    "gemma-3-27b": Row((full(10, 8192), swa(52, 8192, 1024)), 507904, 81920, 131072),
    "gemma-3n-e4b": Row((full(4, 2048), swa(16, 2048, 512)), 40960, 8192, 32768),
    "gemma-4-26b-a4b": Row((full(5, 4096), swa(25, 8192, 1024)), 225280, 20480, 262144),
    "gemma-4-31b": Row((full(10, 8192), swa(50, 16384, 1024)), 901120, 81920, 262144),
    "gpt-oss-20b": Row((full(12, 2048), swa(12, 2048, 128)), 49152, 24576, 131072),
    "gpt-oss-120b": Row((full(18, 2048), swa(18, 2048, 128)), 73728, 36864, 131072),
    "llama-4-scout": Row((full(12, 4096), (ChunkedLocal, 36, 4096, 8192)), 196608, 49152, 10485760),
    "llama-4-maverick": Row((full(12, 4096), (ChunkedLocal, 36, 4096, 8192)), 196608, 49152, 1048576),
    "command-r7b": Row((full(8, 4096), swa(24, 4096, 4097)), 131072, 32768, 131072),
    "phi-3-small": Row((full(32, 4096),), 131072, 131072, 131072),
    "phi-4-mini-flash": Row((full(1, 5120), swa(8, 5120, 512), states(9)), 46080, 5120, 262144),
    "deepseek-v2-lite": Row((latent(27),), 31104, 31104, 163840),
    "deepseek-v3": Row((latent(61),), 70272, 70272, 163840, 1),
    "deepseek-r1": Row((latent(61),), 70272, 70272, 163840, 1),
    "deepseek-v3.2": Row((latent(61, 1152 + 132),), 78324, 78324, 163840, 1),
    "kimi-k2": Row((latent(61),), 70272, 70272, 131072),
    "mimo-v2-flash": Row((full(9, 2560), swa(39, 5120, 128)), 222720, 23040, 262144),
    "step-3.5-flash": Row((full(12, 4096), swa(33, 4096, 512)), 184320, 49152, 262144, 3),
    "step-3.7-flash": Row((full(12, 4096), swa(33, 4096, 512)), 184320, 49152, 262144, 3),
    "exaone-4.0-32b": Row((full(16, 4096), swa(48, 4096, 4096)), 262144, 65536, 131072),
    "olmo-3-7b": Row((full(8, 16384), swa(24, 16384, 4096)), 524288, 131072, 65536),
    "olmo-3-32b": Row((full(16, 4096), swa(48, 4096, 4096)), 262144, 65536, 65536),
    "minimax-m2": Row((full(62, 4096),), 253952, 253952, 196608, 3),
    "qwen3-32b": Row((full(64, 4096),), 262144, 262144, 40960),
    "qwen3-30b-a3b": Row((full(48, 2048),), 98304, 98304, 40960),
    "llama-3.1-8b": Row((full(32, 4096),), 131072, 131072, 131072),
    "llama-3.1-70b": Row((full(80, 4096),), 327680, 327680, 131072),
    "llama-3.1-405b": Row((full(126, 4096),), 516096, 516096, 131072),
    "mixtral-8x7b": Row((full(32, 4096),), 131072, 131072, 32768),
    "qwen3-next-80b": Row((full(12, 2048), states(36)), 24576, 24576, 262144, 1),
    "qwen3.5-4b": Row((full(8, 4096), states(24)), 32768, 32768, 262144, 1),
    "qwen3.5-9b": Row((full(8, 4096), states(24)), 32768, 32768, 262144, 1),
    "qwen3.5-27b": Row((full(16, 4096), states(48)), 65536, 65536, 262144, 1),
    "qwen3.5-35b-a3b": Row((full(10, 2048), states(30)), 20480, 20480, 262144, 1),
    "qwen3.5-122b": Row((full(12, 2048), states(36)), 24576, 24576, 262144, 1),
    "qwen3.5-397b-a17b": Row((full(15, 2048), states(45)), 30720, 30720, 262144, 1),
    "jamba-1.5-mini": Row((full(4, 4096), states(28)), 16384, 16384, 262144),
    "minimax-text-01": Row((full(10, 4096), states(70)), 40960, 40960, 10240000),
}

# Bytes of one layer's state, and MiB of a request's.
STATES = {
    "qwen3-next-80b": (1097728, 37.7),
    "qwen3.5-4b": (2146304, 49.1),
    "qwen3.5-9b": (2146304, 49.1),
    "qwen3.5-27b": (3207168, 146.8),
    "qwen3.5-35b-a3b": (2146304, 61.4),
    "qwen3.5-122b": (4268032, 146.5),
    "qwen3.5-397b-a17b": (4268032, 183.2),
    "jamba-1.5-mini": (311296, 8.3),
    "minimax-text-01": (4194304, 280.0),
    "phi-4-mini-flash": (194560, 1.7),
}


def test_the_table_has_every_preset() -> None:
    assert set(preset_names()) == set(TABLE)
    assert list(preset_names()) == sorted(preset_names())


@pytest.mark.parametrize("name", sorted(TABLE))
def test_bytes_per_token(name: str) -> None:
    layout, row = ModelLayout.preset(name), TABLE[name]
    found = {
        (
            type(group.spec),
            len(group.layers),
            group.spec.bytes_per_token,
            getattr(group.spec, "window", getattr(group.spec, "chunk", 0)),
        )
        for group in layout.groups
    }
    assert found == set(row.layers)
    assert layout.bytes_per_token == row.bytes_per_token
    full_only = sum(group.bytes_per_token for group in layout.groups if type(group.spec) in (FullAttention, MLA))
    assert full_only == row.full_only
    assert layout.max_model_len == row.max_model_len
    assert len(layout.draft_specs) == row.drafts
    assert layout.name == name
    assert [layer.index for layer in layout.layers] == list(range(len(layout.layers)))


@pytest.mark.parametrize("name", sorted(STATES))
def test_state_bytes(name: str) -> None:
    layout = ModelLayout.preset(name)
    [group] = [group for group in layout.groups if isinstance(group.spec, RecurrentState)]
    per_layer, mebibytes = STATES[name]
    assert group.spec.state_bytes == per_layer
    assert round(layout.state_bytes / 2**20, 1) == mebibytes


def test_only_the_recurrent_presets_have_states() -> None:
    assert {name for name in TABLE if ModelLayout.preset(name).state_bytes} == set(STATES)


@pytest.mark.parametrize(
    ("name", "indices"),
    [
        ("llama-3.2-11b-vision", [0, 1, 2, 4]),
        ("ministral-8b-2410", [0, 4, 8, 12]),
        ("gemma-2-9b", [1, 3, 5, 7]),
        ("gemma-3-27b", [5, 11, 17, 23]),
        ("gemma-3n-e4b", [4, 9, 14, 19]),
        ("llama-4-scout", [3, 7, 11, 15]),
        ("phi-4-mini-flash", [17]),
        ("mimo-v2-flash", [0, 5, 11, 17]),
        ("step-3.5-flash", [0, 4, 8, 12]),
        ("qwen3-next-80b", [3, 7, 11, 15]),
        ("jamba-1.5-mini", [4, 12, 20, 28]),
        ("minimax-text-01", [7, 15, 23, 31]),
    ],
)
def test_which_layers_are_full(name: str, indices: list[int]) -> None:
    layers = ModelLayout.preset(name).layers
    assert [layer.index for layer in layers if type(layer.spec) is FullAttention][:4] == indices


def test_layers_that_share() -> None:
    gemma = ModelLayout.preset("gemma-3n-e4b")
    assert [layer.shares for layer in gemma.layers[20:]] == [18, 18, 18, 18, 19] * 3
    phi = ModelLayout.preset("phi-4-mini-flash")
    assert [layer.shares for layer in phi.layers[18:]] == [None, 17] * 7


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("gemma_3_27b", "gemma-3-27b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("mistralai/Ministral-8B-Instruct-2410", "ministral-8b-2410"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("CohereForAI/c4ai-command-r7b-12-2024", "command-r7b"),
        ("microsoft/Phi-4-mini-flash-reasoning", "phi-4-mini-flash"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-v2-lite"),
        ("MiniMax-M2.x", "minimax-m2"),
        ("MiniMaxAI/MiniMax-M2.5", "minimax-m2"),
        ("qwen3-next", "qwen3-next-80b"),
        ("Qwen/Qwen3.5-122B-A10B", "qwen3.5-122b"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4-scout"),
        (" llama-3.1-8b ", "llama-3.1-8b"),
    ],
)
def test_names_and_aliases(asked: str, name: str) -> None:
    assert ModelLayout.preset(asked) == ModelLayout.preset(name)
    assert ModelLayout.preset(asked).name == name


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'gema-3-27b' is not known; did you mean gemma-3-27b"):
        ModelLayout.preset("gema-3-27b")
    with pytest.raises(ConfigError, match=r"'zzz' is not known; known: command-r7b, "):
        ModelLayout.preset("zzz")
    with pytest.raises(ConfigError, match="-it"):
        ModelLayout.preset("-it")
    with pytest.raises(ConfigError, match="is not text"):
        ModelLayout.preset(3)  # type: ignore[arg-type]


def test_summaries_and_notes() -> None:
    assert preset_summary("Gemma-3-27B") == "10 full, 52 sliding (1024) layers"
    assert all(len(preset_summary(name)) < 100 and "\n" not in preset_summary(name) for name in preset_names())
    assert "from memory" in ModelLayout.preset("exaone-4.0-32b").notes[0]
    assert "573440" in ModelLayout.preset("jamba-1.5-mini").notes[0]
    assert ModelLayout.preset("qwen3-32b").notes == ()


def test_sources_name_the_preset() -> None:
    origins = {source.origin for source in ModelLayout.preset("Qwen/Qwen3-32B").sources}
    assert origins == {"preset qwen3-32b"}
