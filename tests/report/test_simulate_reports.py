"""`kvtide simulate` with --json FILE, --html, --compare and --explain from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.sims.report.story import told
from kvtide.sims.serving.recording import Event, Story

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
# Six requests of 600 tokens that grow by 500 each in a pool for about four, so that some are preempted.
TRACE = [{"timestamp": 10 * i, "input_length": 600, "output_length": 500, "hash_ids": [0, 100 + i]} for i in range(6)]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("reports")
    config, trace = folder / "config.json", folder / "trace.jsonl"
    config.write_text(json.dumps(CONFIG))
    lines = [
        *map(json.dumps, TRACE),
        json.dumps({"timestamp": 60, "input_length": 50, "output_length": 0, "hash_ids": [900]}),
    ]
    trace.write_text("\n".join(lines))
    return ["--model", str(config), "--trace", str(trace), "--gpu", "l4", "--kv-cache-memory-bytes", "6MiB"]


def simulate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from kvtide.cli.main import run; run()", "simulate", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_run_writes_everything(flags: list[str], tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="needs the extra report")
    done = simulate(*flags, "--compare", "grouped,kvtide", "--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    assert "Memory policies compared" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert [row["policy"] for row in report["comparison"]] == ["kvtide", "grouped"]
    assert report["preemptions"] > 0
    assert sum(item["finished"] for item in report["series"]) == report["requests"]
    pool = report["pool_bytes_per_rank"]
    assert all(sum(item["memory"].values()) == pytest.approx(pool, rel=0.01) for item in report["series"])
    for histogram in report["distributions"].values():
        assert sum(histogram["counts"]) == report["requests"]
    html = (tmp_path / "r.html").read_text()
    assert "Memory policies compared" in html
    assert "kv cache memory bytes" in html
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "r.json"]


def test_json_without_a_file_is_all_that_is_printed(flags: list[str]) -> None:
    assert json.loads(simulate("--json", *flags).stdout)["requests"] == 6


def test_a_story(flags: list[str]) -> None:
    done = simulate(*flags, "--explain", "5")
    assert done.returncode == 0, done.stderr
    for text in ("Request 4/5: 600 prompt tokens", "arrives:", "is admitted as number", "finishes after"):
        assert text in done.stdout
    assert "throughput" not in done.stdout
    report = json.loads(simulate(*flags, "--explain", "5", "--explain", "1/2", "--json").stdout)
    assert [story["request"] for story in report["stories"]] == ["1/2", "4/5"]


def test_somebody_is_preempted_and_the_story_says_by_whom(flags: list[str]) -> None:
    every = [argument for i in range(1, 7) for argument in ("--explain", str(i))]
    done = simulate(*flags, *every)
    assert "is preempted for" in done.stdout
    assert "it is the last one admitted" in done.stdout
    assert "is admitted again" in done.stdout
    assert "waits for" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--explain", "x"], "--explain 'x' is no request of the trace; its 7 requests are named like '1', '2', '3'"),
        (["--explain", "7"], "request '7' has no prompt or no output"),
        (["--json", "missing/r.json"], "there is no folder missing"),
        (["--html", "missing/r.html"], "there is no folder missing"),
        (["--json", "."], "is a folder"),
        (["--compare", "grouped,best"], "policy 'best' is not known"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_come_before_the_work(flags: list[str], arguments: list[str], message: str) -> None:
    done = simulate(*flags, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("kvtide: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_every_kind_of_event_has_a_sentence() -> None:
    story = Story("0/a", 10, 5, dropped=3)
    story.add(Event(0.0, "refused", {"max_model_len": 2048}))
    story.add(Event(1.0, "decode", {"steps": 1}, 2.0))
    assert list(told(story)) == [
        ("0.000 s", "is refused: its prompt leaves no room in max_model_len 2,048"),
        ("1.000 – 2.000 s", "decodes in 1 step"),
        ("", "... and 3 events more that were not kept"),
    ]
