"""Sweeps: grids, the journal that survives a kill, workers that die, tables, and the command end to end."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.sweep import arguments_of, read_grid, run_point
from kvtide.kvcache import ConfigError
from kvtide.sims import sweep_workers
from kvtide.sims.sweep import Grid, Journal, Point, Result, rows_of
from kvtide.sims.sweep_table import check_table, write_table
from kvtide.sims.sweep_workers import DIED, run_in_processes, run_on_dask

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
TRACE = [{"timestamp": 50 * i, "input_length": 600, "output_length": 20, "hash_ids": [0, 100 + i]} for i in range(12)]
SWEEP = {"axes": ["a"], "flags": "--x 1"}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("sweep")
    config, trace = folder / "config.json", folder / "trace.jsonl"
    config.write_text(json.dumps(CONFIG))
    trace.write_text("\n".join(map(json.dumps, TRACE)))
    return ["--model", str(config), "--trace", str(trace), "--gpu", "l4"]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-c", "from kvtide.cli.main import run; run()", "sweep", *map(str, arguments)]


def sweep(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False)


def point(**values: str | None) -> Point:
    return Point(tuple(values.items()))


# -- grids ------------------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_in_order() -> None:
    grid = Grid({"a": ("1", "2"), "b": ("x", None)})
    assert list(grid.points()) == [point(a="1", b="x"), point(a="1", b=None), point(a="2", b="x"), point(a="2", b=None)]
    assert len(grid) == 4


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "something to vary"),
        ({"a": ()}, "has no values"),
        ({"a": ("1", "1")}, "a value twice"),
        ({"a": tuple(map(str, range(1001))), "b": tuple(map(str, range(1000)))}, "1,001,000 points"),
    ],
)
def test_grids_that_are_none(axes: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Grid(axes)


def test_a_grid_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(
        "max_num_seqs: [4, 8]\nenable-prefix-caching: [true, false]\n"
        "speculative-config: [null, {method: ngram, num_speculative_tokens: 2}]\n"
    )
    grid = read_grid((), file)
    assert grid.axes["max-num-seqs"] == ("4", "8")
    assert grid.axes["enable-prefix-caching"] == ("true", "false")
    none, speculative = grid.axes["speculative-config"]
    assert none is None
    assert json.loads(speculative or "") == {"method": "ngram", "num_speculative_tokens": 2}
    last = list(grid.points())[-1]
    assert arguments_of(["--gpu", "l4"], last)[:5] == [
        "--gpu",
        "l4",
        "--max-num-seqs",
        "8",
        "--no-enable-prefix-caching",
    ]


def test_yaml_without_lists(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text("max-num-seqs: 4\n")
    with pytest.raises(ConfigError, match="max-num-seqs must have a list of values"):
        read_grid((), file)


def test_values_become_numbers_only_together() -> None:
    grid = Grid({"a": ("1", "2"), "b": ("0.5", "1"), "c": ("1", "x"), "d": ("1", None)})
    row = rows_of(grid, {item.key: Result({"f": 1}) for item in grid.points()})[0]
    assert row == {"a": 1, "b": 0.5, "c": "1", "d": "1", "error": None, "f": 1}


# -- the journal ------------------------------------------------------------------------------------------------------


def test_a_journal_remembers(tmp_path: Path) -> None:
    path = tmp_path / "j"
    results = [Result({"x": 1.5, "y": None}), Result(error="no room")]
    with Journal(path, SWEEP) as journal:
        for name, result in zip("12", results, strict=True):
            journal.add(point(a=name), result)
    with Journal(path, SWEEP) as journal:
        assert [journal.results[point(a=name).key] for name in "12"] == results


def test_every_prefix_of_a_journal_can_be_gone_on_with(tmp_path: Path) -> None:
    """A kill can cut the file at any byte; what is whole is kept, what is torn is done again."""
    path = tmp_path / "j"
    with Journal(path, SWEEP) as journal:
        for name in "123":
            journal.add(point(a=name), Result({"x": 1}))
    content = path.read_bytes()
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        with Journal(path, SWEEP) as journal:
            assert len(journal.results) == max(content[:cut].count(b"\n") - 1, 0)
            for name in "123":
                if point(a=name).key not in journal.results:
                    journal.add(point(a=name), Result({"x": 1}))
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello\n", "line 1 is no result"),
        (b'{"a": 1}\n', "is no journal"),
        (b'{"kvtide_sweep": 1, "axes": ["b"], "flags": "--x 1"}\n', "axes differs"),
        (b'{"kvtide_sweep": 1, "axes": ["a"], "flags": "--x 1"}\n{"point": 3}\n', "line 2 is no result"),
    ],
)
def test_journals_of_something_else(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "j"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message), Journal(path, SWEEP):
        pass
    assert path.read_bytes() == content


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", SWEEP), pytest.raises(ConfigError, match="in use"), Journal(tmp_path / "j", SWEEP):
        pass


# -- workers ----------------------------------------------------------------------------------------------------------


def square_or_die(item: Point) -> Result:
    value = int(item.values[0][1] or 0)
    if value == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return Result({"square": value * value})


def test_a_worker_that_dies_takes_no_other_point_with_it(importable: Any) -> None:
    results: dict[str, Result] = {}
    points = [point(a=str(i)) for i in range(8)]
    run_in_processes(points, importable.square_or_die, lambda item, result: results.update({item.key: result}), 2)
    for i, item in enumerate(points):
        assert results[item.key] == (Result(error=DIED) if i == 3 else Result({"square": i * i}))


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This file as a module that other processes can import by name."""
    from importlib import import_module

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    return import_module("test_sweep")


def test_points_run_on_a_dask_cluster(flags: list[str]) -> None:
    distributed = pytest.importorskip("distributed", reason="needs the extra dask")
    results: dict[str, Result] = {}
    grid = Grid({"max-num-seqs": ("1", "4", "nine"), "policy": ("kvtide", "grouped")})
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=40
    ) as cluster:
        run_on_dask(
            list(grid.points()),
            partial(run_point, flags),
            lambda item, result: results.update({item.key: result}),
            cluster.scheduler_address,
        )
    here = {item.key: run_point(flags, item) for item in grid.points()}
    assert results.keys() == here.keys()
    for key, result in results.items():
        if result.figures is None:
            assert result == here[key]
            assert "nine" in key
        else:
            assert {**result.figures, "wall_s": 0} == {**(here[key].figures or {}), "wall_s": 0}


def test_no_cluster_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="needs the extra dask")
    monkeypatch.setattr(sweep_workers, "PATIENCE", 1)
    with pytest.raises(ConfigError, match="no Dask scheduler answers"):
        run_on_dask([point(a="1")], square_or_die, lambda item, result: None, "tcp://127.0.0.1:9")


# -- tables -----------------------------------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {"a": 1, "error": None, "x": 0.5, "n": 3},
    {"a": 2, "error": 'too "small", by far', "x": None, "n": None},
]


def test_csv(tmp_path: Path) -> None:
    write_table(tmp_path / "t.csv", ROWS)
    with (tmp_path / "t.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["a", "error", "x", "n"],
            ["1", "", "0.5", "3"],
            ["2", 'too "small", by far', "", ""],
        ]
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    write_table(tmp_path / "t.parquet", ROWS)
    table = parquet.read_table(tmp_path / "t.parquet")
    assert table.to_pylist() == ROWS
    assert [str(kind) for kind in table.schema.types] == ["int64", "string", "double", "int64"]


def test_other_formats() -> None:
    with pytest.raises(ConfigError, match=r"must end with one of \.csv, \.parquet"):
        check_table(Path("x.xlsx"))


# -- the command ------------------------------------------------------------------------------------------------------


def test_a_sweep_is_what_single_runs_say(flags: list[str], tmp_path: Path) -> None:
    out = tmp_path / "s.csv"
    done = sweep(
        *flags, "--vary", "max-num-seqs=1,4", "--vary", "kv-cache-dtype=auto,fp8,odd", "--out", out, "--jobs", 2
    )
    assert done.returncode == 0, done.stderr
    assert "2 of 6 points failed" in done.stdout
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["max-num-seqs"], row["kv-cache-dtype"]) for row in rows] == [
        (seqs, dtype) for seqs in ("1", "4") for dtype in ("auto", "fp8", "odd")
    ]
    for row in rows:
        alone = subprocess.run(
            [
                *(*command()[:3], "simulate", *flags, "--max-num-seqs", row["max-num-seqs"]),
                *("--kv-dtype", row["kv-cache-dtype"], "--json"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if row["kv-cache-dtype"] == "odd":
            assert alone.returncode == 2
            assert alone.stderr == f"kvtide: {row['error']}\n"
        else:
            report = json.loads(alone.stdout)
            assert float(row["makespan_s"]) == report["makespan_s"]
            assert float(row["ttft_p99_s"]) == report["ttft_s"]["p99"]
            assert int(row["preemptions"]) == report["preemptions"]


def test_a_killed_sweep_goes_on(flags: list[str], tmp_path: Path) -> None:
    out = tmp_path / "s.csv"
    journal = tmp_path / "s.csv.points.jsonl"
    arguments = [*flags, "--vary", f"max-num-seqs={','.join(map(str, range(1, 25)))}", "--out", out, "--jobs", "1"]
    mark = f"KVTIDE_TEST_SWEEP={tmp_path}"
    process = subprocess.Popen(
        command(*arguments),
        env={**os.environ, "KVTIDE_TEST_SWEEP": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not journal.exists() or journal.read_bytes().count(b"\n") < 4):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = journal.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    assert 4 <= before.count(b"\n") < 25
    assert not out.exists()
    while time.monotonic() < deadline and _processes_with(mark):
        time.sleep(0.05)
    assert not _processes_with(mark)  # workers end with their parent
    done = sweep(*arguments)
    assert done.returncode == 0, done.stderr
    after = journal.read_bytes()
    assert after.startswith(before)  # nothing was done twice
    assert after.count(b"\n") == 25
    with out.open(newline="") as file:
        assert [row["max-num-seqs"] for row in csv.DictReader(file)] == [str(i) for i in range(1, 25)]


def _processes_with(mark: str) -> list[int]:
    """Processes that were started with this in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
    return found


def test_more_values_compute_only_what_is_new(flags: list[str], tmp_path: Path) -> None:
    out = tmp_path / "s.csv"
    journal = tmp_path / "s.csv.points.jsonl"
    assert sweep(*flags, "--vary", "max-num-seqs=1,2,x", "--out", out, "--jobs", "1").returncode == 0
    before = journal.read_bytes()
    assert sweep(*flags, "--vary", "max-num-seqs=4,2,x", "--out", out, "--jobs", "1").returncode == 0
    assert journal.read_bytes().startswith(before)
    assert journal.read_bytes().count(b"\n") == before.count(b"\n") + 1
    again = [*flags, "--vary", "max-num-seqs=4,2,x", "--out", out, "--jobs", "1", "--retry-failed"]
    assert sweep(*again).returncode == 0
    assert journal.read_bytes().count(b"\n") == before.count(b"\n") + 2  # x failed, and fails again
    other = sweep("--gpu", "h200", *flags, "--vary", "max-num-seqs=4", "--out", out)
    assert other.returncode == 2
    assert "results of another sweep: flags differs" in other.stderr
    Path(flags[3]).write_text(Path(flags[3]).read_text() + "\n")
    stale = sweep(*flags, "--vary", "max-num-seqs=4", "--out", out)
    assert "input files differs" in stale.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vary", "max-num-seqs"], "must be FLAG=VALUE"),
        (["--vary", "max-seqs=1,2"], "'max-seqs' is no flag"),
        (["--vary", "html=1,2"], "'html' is no flag"),
        (["--vary", "max-num-seqs=1", "--vary", "max_num_seqs=2"], "given twice"),
        (["--vary", "max-num-seqs=1", "--colour", "red"], "No such option"),
        (["--vary", "max-num-seqs=1", "--json"], "a sweep has --out and --html"),
        (["--vary", "max-num-seqs=1", "--out", "x.txt"], "must end with one of"),
        (["--vary", "max-num-seqs=1", "--out", "missing/x.csv"], "there is no folder missing"),
        (["--vary", "max-num-seqs=1", "--dask", "tcp://x:1", "--jobs", "2"], "has its own workers"),
        ([], "something to vary"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_errors_are_one_sentence(flags: list[str], tmp_path: Path, arguments: list[str], message: str) -> None:
    out = [] if "--out" in arguments else ["--out", tmp_path / "x.csv"]
    done = sweep(*flags, *arguments, *out)
    assert done.returncode == 2
    assert done.stderr.startswith("kvtide: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_missing_flag_is_said_once(tmp_path: Path) -> None:
    done = sweep("--vary", "max-num-seqs=1,2", "--gpu", "l4", "--out", tmp_path / "x.csv")
    assert done.returncode == 2
    assert "Missing option '--model'" in done.stderr
