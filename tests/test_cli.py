"""The command as its users run it: tables, JSON, and one sentence with exit code 2 for everything that is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtide.cli import main
from kvtide.kvcache import ModelLayout, preset_names
from kvtide.kvcache.policies import POLICIES

COMMAND = Path(sys.executable).with_name("kvtide")
CAUSES = {"needed", "out_of_window", "group_padding", "page_padding", "block_tail", "free"}


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the console script inside this process; it behaves as in one of its own, and starts faster."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["kvtide", *map(str, arguments)])
        code = 0
        try:
            main.run()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Result(code, *capsys.readouterr())

    return run


def as_json(result: Result) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


def test_waste_json_has_stable_keys(run: Run) -> None:
    result = run("waste", "--model", "gemma-3-27b", "--tokens", 8192, "--json")
    value = as_json(result)
    assert result.stderr == ""
    assert value["model"] == "gemma-3-27b"
    assert value["tokens"] == 8192
    assert list(value["policies"]) == list(POLICIES)
    for policy in value["policies"].values():
        assert set(policy) == {"allocated_bytes", "needed_bytes", "waste_fraction", "by_cause", "by_kind"}
        assert set(policy["by_cause"]) == CAUSES
        assert sum(policy["by_cause"].values()) == policy["allocated_bytes"]
        assert policy["waste_fraction"] == pytest.approx(1 - policy["needed_bytes"] / policy["allocated_bytes"])
        assert set(policy["by_kind"]) == {"full_attention", "sliding_window"}


def test_mllama_by_text_and_image_tokens(run: Run) -> None:
    arguments = ("--model", "llama-3.2-11b-vision", "--text-tokens", 43, "--image-tokens", 6193, "--json")
    value = as_json(run("waste", *arguments))
    assert f"{value['policies']['uniform']['waste_fraction']:.1%}" == "79.6%"


def test_policies_are_chosen_and_ordered(run: Run) -> None:
    value = as_json(run("waste", "--model", "gpt-oss-20b", "--tokens", 100, "--policy", "kvtide, uniform", "--json"))
    assert list(value["policies"]) == ["kvtide", "uniform"]


def test_trace_waste_and_its_table(run: Run) -> None:
    value = as_json(run("waste", "--model", "gemma-3-27b", "--trace", "demo", "--json"))
    assert value["trace"] == "demo"
    assert value["requests"] == 2000
    table = run("waste", "--model", "gemma-3-27b", "--trace", "demo")
    assert table.returncode == 0
    assert table.stderr == ""  # no progress bar when stderr is not a terminal
    for policy, figures in value["policies"].items():
        assert policy in table.stdout
        assert f"{figures['waste_fraction']:.2%}" in table.stdout


def test_a_generic_csv(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "log.csv"
    trace.write_text("when,prompt,completion\n1,100,20\n2,200,30\n")
    columns = "input=prompt,output=completion"
    value = as_json(run("waste", "--model", "llama-3.1-8b", "--trace", trace, "--trace-columns", columns, "--json"))
    assert value["requests"] == 2
    assert value["total_tokens"] == 350


def test_a_config_file_gives_what_its_preset_gives(run: Run, shared: Path) -> None:
    config = shared / "model_configs" / "openai--gpt-oss-120b.json"
    from_file = as_json(run("waste", "--model", config, "--tokens", 5000, "--json"))
    from_name = as_json(run("waste", "--model", "gpt-oss-120b", "--tokens", 5000, "--json"))
    assert from_file["policies"] == from_name["policies"]


def test_kv_dtype_and_tp_change_the_bytes(run: Run) -> None:
    def needed(*more: object) -> int:
        value = as_json(run("waste", "--model", "llama-3.1-8b", "--tokens", 1000, "--json", *more))
        return int(value["policies"]["kvtide"]["needed_bytes"])

    assert needed() == 1000 * 131072
    assert needed("--kv-dtype", "fp8") == 1000 * 131072 // 2
    assert needed("--tp", 4) == 1000 * 131072 // 4
    assert needed("--tp", 16) == 1000 * 131072 // 8  # 8 KV heads are replicated beyond 8 ranks


def test_draft_layers_join_the_layout(run: Run) -> None:
    plain = as_json(run("layout", "--model", "deepseek-v3", "--json"))
    drafted = as_json(run("layout", "--model", "deepseek-v3", "--speculative", "mtp", "--json"))
    assert drafted["bytes_per_token"] - plain["bytes_per_token"] == 1152
    assert drafted["layers"][-1] == {"index": 61, "kind": "mla", "shares": None, "draft": True}
    eagle = as_json(run("layout", "--model", "gpt-oss-120b", "--speculative", "eagle", "--json"))
    assert len(eagle["groups"][1]["layers"]) == 19


def test_layout_shows_groups_geometry_and_sources(run: Run, shared: Path) -> None:
    config = shared / "model_configs" / "google--gemma-4-26B-A4B.json"
    value = as_json(run("layout", "--model", config, "--json"))
    assert {group["kind"]: len(group["layers"]) for group in value["groups"]} == {
        "full_attention": 5,
        "sliding_window": 25,
    }
    assert any("num_global_key_value_heads" in source["origin"] for source in value["sources"])
    table = run("layout", "--model", config)
    assert "num_global_key_value_heads" in table.stdout
    aligned = as_json(run("layout", "--model", "qwen3.5-4b", "--json"))
    assert aligned["geometry"]["grouped"]["groups"]["full_attention"]["block_size"] == 528


def test_plan_json(run: Run) -> None:
    value = as_json(run("plan", "--model", "gemma-3-27b", "--memory", "80GiB", "--tokens", 131072, "--json"))
    assert list(value["policies"]) == list(POLICIES)
    for policy in value["policies"].values():
        assert {"max_concurrency", "max_context", "bytes_per_request"} <= set(policy)
    assert value["vllm"]["blocks_per_request"] == 14726
    assert value["policies"]["kvtide"]["max_concurrency"] > value["vllm"]["max_concurrency"]
    assert "14,726" in run("plan", "--model", "gemma-3-27b", "--memory", "80GiB", "--tokens", 131072).stdout


def test_models_lists_every_preset(run: Run) -> None:
    value = as_json(run("models", "--json"))
    assert list(value["models"]) == list(preset_names())
    table = run("models").stdout
    assert all(name in table for name in preset_names())


def test_a_yaml_layout(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nspecs:\n  full: {kind: full_attention, num_kv_heads: 8, head_dim: 128}\nlayers: 4*full\n"
    )
    value = as_json(run("waste", "--model", path, "--tokens", 16, "--json"))
    assert value["policies"]["kvtide"]["needed_bytes"] == 16 * 4 * 4096


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "Usage"),
        (("tide",), "tide"),
        (("waste",), "--model"),
        (("waste", "--model", "gemma-3-27b"), "--trace"),
        (("waste", "--model", "gema-3-27b", "--tokens", "5"), "gemma-3-27b"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "five"), "five"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "0"), "0"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "-3"), "-3"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "9" * 30), "--tokens"),
        (("waste", "--model", "gemma-3-27b", "--image-tokens", "-1", "--text-tokens", "9"), "--image-tokens"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "5", "--trace", "demo"), "--trace"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "5", "--text-tokens", "5"), "--text-tokens"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "5", "--num-requests", "5"), "--num-requests"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "5", "--policy", "best"), "best"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "5", "--policy", ""), "policy"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "5", "--block-size", "0"), "--block-size 0"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "5", "--min-block-size", "0"), "--min-block-size 0"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "5", "--kv-dtype", "fp3"), "fp3"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "5", "--kv-dtype", "fp8_ds_mla"), "fp8_ds_mla"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "5", "--tp", "3"), "3"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "5", "--tp", "0"), "--tp 0"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "5", "--speculative", "mtp"), "gemma-3-27b"),
        (("waste", "--model", "mistral-7b-v0.1", "--tokens", "5", "--speculative", "eagle"), "EAGLE"),
        (("waste", "--model", "missing/config.json", "--tokens", "5"), "missing/config.json"),
        (("waste", "--model", "missing.yaml", "--tokens", "5"), "missing.yaml"),
        (("waste", "--model", "gemma-3-27b", "--trace", "missing.jsonl"), "missing.jsonl"),
        (("waste", "--model", "gemma-3-27b", "--trace", "demo", "--trace-columns", "prompt"), "prompt"),
        (("waste", "--model", "gemma-3-27b", "--trace", "demo", "--num-requests", "0"), "--num-requests"),
        (("waste", "--model", "gemma-3-27b", "--trace", "demo", "--trace-format", "csv"), "csv"),
        (("plan", "--model", "gemma-3-27b", "--memory", "80 parrots", "--tokens", "5"), "80 parrots"),
        (("plan", "--model", "gemma-3-27b", "--memory", "0", "--tokens", "5"), "0"),
        (("plan", "--model", "gemma-3-27b", "--memory", "80GiB"), "--tokens"),
        (("plan", "--model", "gemma-3-27b", "--memory", "80GiB", "--tokens", "5", "--image-tokens", "-4"), "-4"),
        (("layout", "--model", ""), "model"),
        (("layout", "--model", "x" * 300), "too long"),
        (("layout", "--model", "/dev/zero"), "regular file"),
        (("waste", "--model", "gemma-3-27b", "--trace", ""), "--trace"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "8", "--concurrency", "3"), "--concurrency"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "8", "--seed", "3"), "--seed"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "8", "--replay"), "--replay"),
        (("waste", "--model", "gemma-3-27b", "--trace", "demo", "--kv-from-activations"), "--kv-from-activations"),
        (("waste", "--model", "gemma-3-27b", "--trace", "demo", "--seed", "-1"), "--seed"),
        (("waste", "--model", "gemma-3-27b", "--tokens", "9" * 5000), "--tokens"),
        (("plan", "--model", "gemma-3-27b", "--memory", "9" * 400, "--tokens", "5"), "not a size"),
    ],
)
def test_wrong_arguments_are_one_sentence(run: Run, arguments: tuple[str, ...], named: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert named in result.stderr
    assert "Traceback" not in result.stderr
    if arguments:
        assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b'{"model_type": "llama"}',
        b'{"model_type": "zzz", "num_hidden_layers": -1}',
        b'{"num_hidden_layers": 1e400}',
    ],
)
def test_broken_configs_are_one_sentence(run: Run, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    result = run("layout", "--model", path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "config.json" in result.stderr


def test_a_bad_row_names_file_and_line(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    good = '{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [0]}\n'
    trace.write_text(good + good.replace("10", "-10"))
    result = run("waste", "--model", "gemma-3-27b", "--trace", trace, "--json")
    assert result.returncode == 2
    assert result.stdout == ""
    assert "trace.jsonl" in result.stderr
    assert "2" in result.stderr
    assert "-10" in result.stderr


def test_names_from_files_are_not_markup(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        'name: "x[/foo]:smile:"\nspecs:\n  full: {kind: full_attention, num_kv_heads: 8, head_dim: 128}\nlayers: full\n'
    )
    trace = tmp_path / "[old]log.csv"
    trace.write_text("prompt,completion\n100,20\n")
    waste = run("waste", "--model", path, "--trace", trace, "--trace-columns", "input=prompt,output=completion")
    assert "x[/foo]:smile:" in waste.stdout
    assert "[old]log.csv" in waste.stdout
    assert "x[/foo]:smile:" in run("layout", "--model", path).stdout
    assert "x[/foo]:smile:" in run("plan", "--model", path, "--memory", "1GiB", "--tokens", 10).stdout


def test_bytes_beyond_int64_are_refused_not_wrong(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    row = '{"timestamp": 0, "input_length": %d, "output_length": 1, "hash_ids": []}\n'
    trace.write_text(row % 2**40 * 30)
    result = run("waste", "--model", "gemma-4-31b", "--trace", trace, "--policy", "uniform")
    assert result.returncode in (0, 2)
    if result.returncode == 0:
        value = as_json(run("waste", "--model", "gemma-4-31b", "--trace", trace, "--policy", "uniform", "--json"))
        assert value["policies"]["uniform"]["allocated_bytes"] >= 30 * 2**40 * 901120
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": 9000, "num_attention_heads": 2**30, "head_dim": 2**30})
    )
    huge = run("waste", "--model", config, "--tokens", 2**40)
    assert huge.returncode == 2
    assert len(huge.stderr.strip().splitlines()) == 1


def test_many_long_requests_add_up_exactly(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("a,b\n" + "3000000000,0\n" * 8000)
    arguments = ("--trace", trace, "--trace-columns", "input=a,output=b", "--policy", "uniform", "--json")
    value = as_json(run("waste", "--model", "gemma-3-27b", *arguments))
    assert value["policies"]["uniform"]["allocated_bytes"] == 8000 * 3_000_000_000 * 507904


def test_mistral_params_under_any_name(run: Run, tmp_path: Path) -> None:
    params = {"dim": 4096, "n_layers": 4, "head_dim": 128, "n_heads": 32, "n_kv_heads": 8, "sliding_window": [None, 64]}
    (tmp_path / "params.json").write_text(json.dumps(params))
    (tmp_path / "mst.json").write_text(json.dumps(params))
    for model in (tmp_path, tmp_path / "params.json", tmp_path / "mst.json"):
        value = as_json(run("layout", "--model", model, "--json"))
        assert {group["kind"] for group in value["groups"]} == {"full_attention", "sliding_window"}


def test_a_folder_of_a_presets_name_does_not_hide_it(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gemma-3-27b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert as_json(run("layout", "--model", "gemma-3-27b", "--json"))["bytes_per_token"] == 507904


@pytest.mark.parametrize("model", ["jamba-1.5-mini", "minimax-text-01", "llama-3.2-11b-vision"])
def test_replays_of_every_kind_of_model(run: Run, model: str) -> None:
    arguments = ("--trace", "demo", "--num-requests", 20, "--replay", "--concurrency", 4, "--json")
    value = as_json(run("waste", "--model", model, *arguments))
    assert "kvtide" in value["policies"]
    assert value["notes"]
    for policy in value["policies"].values():
        assert sum(policy["by_cause"].values()) == pytest.approx(policy["allocated_bytes"])
        assert sum(kind["allocated_bytes"] for kind in policy["by_kind"].values()) == pytest.approx(
            policy["allocated_bytes"]
        )


def test_a_terminal_without_unicode() -> None:
    environment = {"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"}
    arguments = [COMMAND, "plan", "--model", "gemma-3-27b", "--memory", "8GiB", "--tokens", "1000"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 0
    assert result.stderr == ""
    assert "kvtide" in result.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["models"], ["models", "--json"]])
def test_a_full_disk_behind_stdout(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run([COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("kvtide: cannot write")
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_installed_script() -> None:
    good = subprocess.run([COMMAND, "models", "--json"], capture_output=True, text=True, timeout=60)
    assert good.returncode == 0
    assert good.stderr == ""
    assert len(json.loads(good.stdout)["models"]) == len(preset_names())
    bad = subprocess.run([COMMAND, "waste", "--model", "nothing"], capture_output=True, text=True, timeout=60)
    assert bad.returncode == 2
    assert bad.stdout == ""
    assert len(bad.stderr.strip().splitlines()) == 1


def test_a_reader_that_goes_away_is_no_failure() -> None:
    script = f"{COMMAND} models | head -1"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stderr == ""


def test_help_of_every_command(run: Run) -> None:
    listing = run("--help")
    assert listing.returncode == 0
    for command in ("waste", "layout", "plan", "models"):
        assert command in listing.stdout
        assert run(command, "--help").returncode == 0


def test_a_config_is_the_same_from_its_folder(run: Run, tmp_path: Path) -> None:
    layout = ModelLayout.preset("llama-3.1-8b")
    config = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    value = as_json(run("layout", "--model", tmp_path, "--json"))
    assert value["bytes_per_token"] == layout.bytes_per_token
