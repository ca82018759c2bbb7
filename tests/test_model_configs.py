"""Real config files: each must give the layout of its model, and equal that model's preset layer by layer.

The files lie outside the repository: in `model_configs` of the folder that `KVTIDE_SHARED` names, by default `shared`
beside the repository. Without them these tests are skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtide.kvcache import ModelLayout

SHARED = Path(os.environ.get("KVTIDE_SHARED", Path(__file__).parents[2] / "shared"))
FOLDER = SHARED / "model_configs"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no model configs in {FOLDER}; set KVTIDE_SHARED")

# File, preset, bytes per token in all layers, layers that each group has, draft layers.
CONFIGS = [
    ("MiniMaxAI--MiniMax-M2.5", "minimax-m2", 253952, {"full_attention": 62}, 3),
    ("Qwen--Qwen3-30B-A3B", "qwen3-30b-a3b", 98304, {"full_attention": 48}, 0),
    ("Qwen--Qwen3-32B", "qwen3-32b", 262144, {"full_attention": 64}, 0),
    ("Qwen--Qwen3.5-35B-A3B", "qwen3.5-35b-a3b", 20480, {"recurrent_state": 30, "full_attention": 10}, 1),
    ("XiaomiMiMo--MiMo-V2-Flash", "mimo-v2-flash", 222720, {"full_attention": 9, "sliding_window": 39}, 0),
    ("deepseek-ai--DeepSeek-R1", "deepseek-r1", 70272, {"mla": 61}, 1),
    ("deepseek-ai--DeepSeek-V3", "deepseek-v3", 70272, {"mla": 61}, 1),
    ("deepseek-ai--DeepSeek-V3.2", "deepseek-v3.2", 78324, {"mla": 61}, 1),
    ("google--gemma-4-26B-A4B", "gemma-4-26b-a4b", 225280, {"sliding_window": 25, "full_attention": 5}, 0),
    (
        "meta-llama--Llama-4-Scout-17B-16E-Instruct",
        "llama-4-scout",
        196608,
        {"chunked_local": 36, "full_attention": 12},
        0,
    ),
    ("meta-llama--Meta-Llama-3.1-8B", "llama-3.1-8b", 131072, {"full_attention": 32}, 0),
    ("mistralai--Mixtral-8x7B-v0.1", "mixtral-8x7b", 131072, {"full_attention": 32}, 0),
    ("moonshotai--Kimi-K2-Instruct", "kimi-k2", 70272, {"mla": 61}, 0),
    ("openai--gpt-oss-120b", "gpt-oss-120b", 73728, {"sliding_window": 18, "full_attention": 18}, 0),
]


@pytest.mark.parametrize(("file", "preset", "size", "groups", "drafts"), CONFIGS, ids=[row[0] for row in CONFIGS])
def test_config_gives_the_layout_of_its_preset(
    file: str, preset: str, size: int, groups: dict[str, int], drafts: int
) -> None:
    layout = ModelLayout.from_hf(FOLDER / f"{file}.json")
    assert layout.bytes_per_token == size
    assert {group.name: len(group.layers) for group in layout.groups} == groups
    assert len(layout.draft_specs) == drafts
    expected = ModelLayout.preset(preset)
    assert layout.layers == expected.layers
    assert layout.draft_specs == expected.draft_specs
    assert layout.max_model_len == expected.max_model_len
    origins = {source.origin.split(":")[0] for source in layout.sources}
    assert origins <= {f"{file}.json", "default", "derived", *(o for o in origins if o.startswith("class default of"))}


def test_every_config_file_is_in_the_table() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {row[0] for row in CONFIGS}
