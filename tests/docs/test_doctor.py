"""`kvtide doctor` as its user runs it, with parts that work, that are absent, and that are broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.cli import probes
from kvtide.cli.doctor import PARTS
from kvtide.kvcache import MissingExtra

KVTIDE = Path(sys.executable).with_name("kvtide")


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KVTIDE, "doctor", *arguments], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_the_base_install_is_healthy() -> None:
    base = [part.name for part in PARTS if part.required]
    done = doctor(*base, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    value = json.loads(done.stdout)
    assert value["healthy"] is True
    assert [part["name"] for part in value["parts"]] == base
    assert all(part["works"] for part in value["parts"])
    assert value["packages"]["numpy"]


def test_text_is_short_and_says_why_not() -> None:
    done = doctor("LMDBConnector", "vLLM")
    lines = done.stdout.splitlines()
    assert "  LMDBConnector  works" in lines
    if probes.answer("vllm") == probes.Answer(False, "vllm is not installed here"):
        assert "  vLLM           no      vllm is not installed here" in lines
        assert done.returncode == 1
    assert len(lines) < 12


def test_kernels_are_really_called() -> None:
    pytest.importorskip("torch")
    done = doctor("kernel", "--json")
    parts = {part["name"]: part for part in json.loads(done.stdout)["parts"]}
    assert parts["TORCH_REFERENCE"]["works"]
    assert done.returncode == 0
    assert all(part["note"] for part in parts.values() if not part["works"])


def test_an_unknown_part_is_one_sentence() -> None:
    done = doctor("RedysConnector")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvtide: 'RedysConnector' is not known; allowed are HostConnector")
    assert done.stderr.count("\n") == 1


def test_a_temporary_directory_that_cannot_be_written_is_the_reason(tmp_path: Path) -> None:
    done = doctor("LMDBConnector", TMPDIR=str(tmp_path / "absent"), TEMP="", TMP="", HOME=str(tmp_path))
    # Python falls back to other directories, so the store works, or the reason is given; never a traceback.
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode in (0, 1)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, probe, extra in (("redis", "redis", "redis"), ("boto3", "s3", "s3"), ("torch", "gpu", "torch")):
        monkeypatch.setitem(sys.modules, module, None)
        answer = probes.answer(probe)
        assert answer == probes.Answer(False, f"not installed: pip install 'kvtide[{extra}]'")


def test_whatever_a_probe_raises_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> probes.Answer:
        raise ImportError("libcuda.so.1: cannot open\nshared object file")

    monkeypatch.setitem(probes.PROBES, "lmdb", broken)
    assert probes.answer("lmdb") == probes.Answer(False, "libcuda.so.1: cannot open shared object file")
    assert "kvtide[x]" in str(MissingExtra("a", "b", "x"))


def test_a_probe_that_crashes_spoils_only_its_own_answer(tmp_path: Path) -> None:
    """A native library that ends the process: here a package of the name that the probe imports."""
    (tmp_path / "redis.py").write_text("import os, sys\nprint('boom', file=sys.stderr, flush=True)\nos._exit(134)\n")
    done = doctor("RedisConnector", "HostConnector", "--json", PYTHONPATH=str(tmp_path))
    parts = {part["name"]: part for part in json.loads(done.stdout)["parts"]}
    assert parts["HostConnector"]["works"]
    assert parts["RedisConnector"]["note"] == "its process ends with code 134: boom"
    assert done.returncode == 1


def test_what_a_library_prints_is_not_the_answer(tmp_path: Path) -> None:
    (tmp_path / "boto3.py").write_text("print('{}')\n")
    done = doctor("S3Connector", "--json", PYTHONPATH=str(tmp_path))
    assert json.loads(done.stdout)["parts"][0]["works"] is True
