"""`kvtide simulate` and `kvtide calibrate` from the command line: reports, flags, one-sentence errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
TRACE = [{"timestamp": 200 * i, "input_length": 600, "output_length": 20, "hash_ids": [0, 100 + i]} for i in range(12)]


HOST_JSON = '{"kv_connector": "HostConnector", "kv_connector_extra_config": {"max_bytes": "1GiB", "eviction": "arc"}}'


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A small model's config and a trace whose prompts share their first 512 tokens."""
    folder = tmp_path_factory.mktemp("simulate")
    config, trace = folder / "config.json", folder / "trace.jsonl"
    config.write_text(json.dumps(CONFIG))
    trace.write_text("\n".join(map(json.dumps, TRACE)))
    return str(config), str(trace)


def kvtide(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from kvtide.cli.main import run; run()", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def report_of(*arguments: str) -> dict[str, Any]:
    done = kvtide("simulate", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_report(files: tuple[str, str]) -> None:
    report = report_of("--model", files[0], "--trace", files[1], "--gpu", "l4")
    assert (report["requests"], report["prompt_tokens"], report["output_tokens"]) == (12, 7200, 240)
    assert report["hit_rate"] == pytest.approx(11 * 512 / 7200)
    settings = report["settings"]
    assert (settings["max_num_seqs"], settings["max_num_batched_tokens"], settings["rules"]) == (256, 2048, "0.33")
    assert report["ttft_s"]["p50"] > report["tpot_s"]["p50"] > 0
    assert report["preemptions"] == 0
    pool = report["pool_bytes_per_rank"]
    for sample in report["timeline"]:
        assert sum(sample["memory"].values()) == pytest.approx(pool, rel=0.01)


def test_the_terminal_summary(files: tuple[str, str]) -> None:
    done = kvtide("simulate", "--model", files[0], "--trace", files[1], "--gpu", "l4:2", "--num-requests", "5")
    assert done.returncode == 0, done.stderr
    for text in ("5 requests", "2 x l4", "time to first token", "of prompt tokens hit", "idle_cached", "us each"):
        assert text in done.stdout


def test_drafts_and_flags(files: tuple[str, str]) -> None:
    speculative = '{"method": "ngram", "num_speculative_tokens": 3}'
    report = report_of(
        *("--model", files[0], "--trace", files[1], "--gpu", "h200", "--policy", "grouped"),
        *("--speculative-config", speculative, "--acceptance-rates", "0.9,0.8,0.7", "--max-num-seqs", "4"),
        *("--kv-cache-memory-bytes", "200MiB", "--max-model-len", "1024", "--no-enable-prefix-caching"),
    )
    assert report["drafts"]["mean_acceptance_length"] > 2.5
    assert report["settings"]["async_scheduling"] is False  # vLLM refuses it with n-gram drafts
    assert report["hit_rate"] == 0
    assert report["pool_bytes_per_rank"] == 200 << 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h900"], "is not known; allowed: h200"),
        (["--gpu", "l4:2", "--tp", "3"], "are not the 2 devices"),
        (["--gpu", "l4", "--model", "gpt-oss-20b"], "give its config.json, or --params"),
        (["--gpu", "l4", "--active-params", "1"], "give both"),
        (["--gpu", "l4", "--bytes-per-param", "1"], "give both"),
        (["--gpu", "l4", "--params", "1", "--bytes-per-param", "0"], "must have from 0.1 to 8"),
        (["--gpu", "l4", "--data-parallel-size", "2"], "engines of their own"),
        (["--gpu", "l4", "--acceptance-rate", "0.5"], "give --speculative-config"),
        (
            ["--gpu", "l4", "--speculative-config", "{method: ngram, num_speculative_tokens: 2}"],
            "give --acceptance-rate",
        ),
        (["--gpu", "l4", "--efficiency", "missing.json"], "missing.json"),
        (["--gpu", "l4", "--offload-tier", "host:1GB"], "must be NAME:SIZE:BANDWIDTH"),
        (["--gpu", "l4", "--offload-windows", "none"], "need a tier"),
        (["--gpu", "l4", "--preemption", "swap"], "needs room to swap to"),
        (["--gpu", "l4", "--swap-space", "1GB"], "give --preemption swap or auto"),
        (["--gpu", "l4", "--offload-tier", "h:1GB:1GB/s", "--swap-space", "1GB"], "runs without tiers"),
        (["--gpu", "l4", "--kv-transfer-config", '{"kv_connector": "HostConnector"}'], "max_bytes"),
        (["--gpu", "l4", "--kv-transfer-config", HOST_JSON], "how fast is HostConnector?"),
        (["--gpu", "l4", "--kv-transfer-config", HOST_JSON, "--offload-tier", "x:1GB:1GB/s"], "NAME::BANDWIDTH"),
        (["--gpu", "l4", "--max-num-batched-tokens", "8", "--max-num-seqs", "9"], "must be at least max_num_seqs 9"),
        (["--gpu", "l4", "--speculative-config", "{method: mtp}", "--acceptance-rate", "1"], "num_speculative_tokens"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_errors_are_one_sentence(files: tuple[str, str], arguments: list[str], message: str) -> None:
    model = [] if "--model" in arguments else ["--model", files[0]]
    done = kvtide("simulate", "--trace", files[1], *model, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("kvtide: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    "tier",
    [
        ["--offload-tier", "host:1GiB:50GB/s:10us:eviction=arc"],
        ["--kv-transfer-config", HOST_JSON, "--offload-tier", "HostConnector::50GB/s:10us"],
    ],
    ids=["flags", "config"],
)
def test_offload(files: tuple[str, str], tier: list[str]) -> None:
    """A pool of 1,638 tokens beside a tier; flags and a connector configuration mean the same."""
    small = ["--kv-cache-memory-bytes", "12MiB", "--max-model-len", "700", "--max-num-batched-tokens", "256"]
    arguments = ["--model", files[0], "--trace", files[1], "--gpu", "l4", "--max-num-seqs", "2", *small, *tier]
    report = report_of(*arguments)
    offload = report["offload"]
    name = "HostConnector" if "--kv-transfer-config" in tier else "host"
    assert list(offload["hit_rate_by_tier"]) == ["device", name]
    assert sum(offload["hit_rate_by_tier"].values()) == pytest.approx(report["hit_rate"])
    (used,) = offload["tiers_per_rank"]
    assert used["capacity"] == 2**30
    assert sum(used["bytes_by_kind"].values()) + used["free_bytes"] == 2**30
    assert offload["stored_bytes"] > 0
    printed = kvtide("simulate", *arguments).stdout
    assert f"tier        {name}: " in printed


def test_drafts_are_measured_where_the_trace_has_token_ids(files: tuple[str, str], tmp_path: Path) -> None:
    text = list(range(500, 600))
    trace = tmp_path / "ids.jsonl"
    trace.write_text(json.dumps({"prompt_token_ids": text, "output_token_ids": text, "timestamp": 0}))
    config = '{"method": "ngram", "num_speculative_tokens": 4}'
    arguments = ["--model", files[0], "--trace", str(trace), "--gpu", "l4", "--speculative-config", config]
    drafts = report_of(*arguments)["drafts"]
    assert drafts["measured"] is True
    assert drafts["acceptance_rate"] > 0.9
    assert len(drafts["per_position"]) == 4
    assert "of drafts measured" in kvtide("simulate", *arguments).stdout
    assumed = report_of(*arguments, "--acceptance-rate", "0.5")["drafts"]
    assert assumed["measured"] is False
    assert assumed["acceptance_rate"] < 0.6


def test_swap_space(files: tuple[str, str]) -> None:
    arguments = ["--model", files[0], "--trace", files[1], "--gpu", "l4"]
    report = report_of(*arguments, "--preemption", "swap", "--swap-space", "1GiB")
    assert report["offload"]["swapped_out"] == report["preemptions"] == 0
    assert report["offload"]["tiers_per_rank"][0]["name"] == "swap"


def test_calibrate_and_use_the_result(files: tuple[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "meta.json").write_text(json.dumps({"engine_kwargs": {"max_num_seqs": 8, "max_num_batched_tokens": 512}}))
    rows = [
        {
            "request_id": str(i),
            "input_toks": 400,
            "output_toks": 20,
            "queued_ts": 0.05 * i,
            "first_token_ts": 0.05 * i + 0.05,
            "last_token_ts": 0.05 * i + 0.25,
        }
        for i in range(8)
    ]
    (run / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = kvtide("calibrate", str(run), "--model", files[0], "--gpu", "l4", "--check", str(run))
    assert done.returncode == 0, done.stderr
    assert "run (predicted)" in done.stdout
    printed = kvtide("calibrate", str(run), "--model", files[0], "--gpu", "l4", "--json").stdout
    fitted = tmp_path / "calibration.json"
    fitted.write_text(printed)
    report = report_of("--model", files[0], "--trace", files[1], "--gpu", "l4", "--efficiency", str(fitted))
    assert report["efficiency"] == json.loads(printed)["efficiency"]
    lost = kvtide("calibrate", str(run), "--model", files[0], "--gpu", "l4", "--check-model", files[0])
    assert lost.returncode == 2
    assert "give --check" in lost.stderr
