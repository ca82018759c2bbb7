"""`kvtide doctor`, as it finds this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvtide.cli import probes


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from kvtide.cli.main import run; run()"
    command = [sys.executable, "-c", code, "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_doctor_finds_what_is_here_and_says_why_the_rest_is_not(tmp_path):
    config = {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": str(tmp_path / "kv")}}
    done = doctor("--json", json.dumps(config))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["healthy"] is True
    assert set(found["stores"]) == {*probes.STORES, "CONFIG"}
    for name in (*probes.ESSENTIAL, "CONFIG"):
        assert found["stores"][name] == {"works": True, "text": "a value went in and came back"}
    assert all(each["works"] or each["text"] for each in found["stores"].values())
    assert found["kernels"]["FLASHMLA"]["works"] is False or found["kernels"]["FLASHMLA"]["text"] == ""
    assert found["packages"]["numpy"]
    assert not list((tmp_path / "kv").glob("*doctor*"))


def test_a_store_that_cannot_be_opened_is_one_sentence_and_exit_code_1(tmp_path, monkeypatch, capsys):
    from kvtide.cli import doctor as module

    monkeypatch.setattr(module, "STORES", ("HostConnector",))  # the rest is tried above
    monkeypatch.setattr(module, "_kernels", lambda: [])
    (tmp_path / "file").write_text("")
    config = {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": str(tmp_path / "file")}}
    with pytest.raises(SystemExit) as ended:
        module.command.main([json.dumps(config)], standalone_mode=False)
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "Traceback" not in out
    (line,) = [line for line in out.splitlines() if line.startswith("│ CONFIG")]
    assert "│ no " in line
    assert "not healthy" in out


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("raise SystemExit('went wrong')", "exit code 1 went wrong"),
        ("import time; time.sleep(60)", "no answer within 1 seconds"),
    ],
)
def test_a_library_that_crashes_or_hangs_is_a_finding(code, text, monkeypatch):
    monkeypatch.setattr(probes, "TIMEOUT_S", 1.0)
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **options: run([sys.executable, "-c", code], **options))
    assert probes.run_probe("HostConnector") == probes.Finding("HostConnector", False, f"{found(text)}")


def found(text):
    return text if text.startswith("no answer") else f"the process ended with {text}"


def test_a_probe_that_fails_says_so(capsys, monkeypatch):
    def broken():
        raise OSError("no such\nthing")

    monkeypatch.setattr(probes, "PROBES", {"X": broken})
    probes.answer("X")
    assert '[false, "OSError: no such thing"]' in capsys.readouterr().out
