"""`kvtide kernels` as its users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtide.cli import main
from kvtide.kernels.registry import VARIABLE, Backend

COMMAND = Path(sys.executable).with_name("kvtide")


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `kvtide kernels` inside this process, with no backend forced."""
    monkeypatch.delenv(VARIABLE, raising=False)

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["kvtide", "kernels", *map(str, arguments)])
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


def test_json_has_stable_keys(run: Run) -> None:
    value = as_json(run("--arch", "cpu", "--json"))
    assert set(value) == {"machine", "call", "picked", "complaint", "order", "preference", "backends"}
    assert value["machine"] == {"kind": "cpu", "capability": [0, 0]}
    assert value["order"] == ["CPU", "TORCH_REFERENCE"]
    assert set(value["backends"]) == set(Backend.__members__)
    for backend in value["backends"].values():
        assert set(backend) == {"available", "reasons", "by_name_only"}
        assert backend["available"] is (not backend["reasons"])
    assert value["call"]["heads"] == 128
    assert value["call"]["format"] == "bfloat16"


def test_what_is_asked_for_decides(run: Run) -> None:
    def reasons(*arguments: object) -> list[str]:
        value = as_json(run("--arch", "9.0", "--json", *arguments))["backends"]["FLASHMLA"]["reasons"]
        return [reason for reason in value if "not installed" not in reason]

    assert reasons() == []
    assert reasons("--heads", 130, "--block-size", 16) == [
        "130 heads are more than 128",
        "block size 16 is not a multiple of 64",
    ]
    assert reasons("--format", "fp8_ds_mla") == ["format fp8_ds_mla is not float16 or bfloat16"]
    assert reasons("--dtype", "float16") == ["cache bfloat16 is not the query's float16"]
    assert reasons("--latent", "256+64") == ["latent 256 + rope 64 is not 512 + 64"]
    assert reasons("--window", 128, "--sink", "--batch-invariant") == [
        "no sliding window, and 128 is asked for",
        "no attention sink",
        "a row's result may depend on its batch",
    ]


def test_a_finite_pool_widens_the_choice(run: Run) -> None:
    def by_name_only(*arguments: object) -> str | None:
        backends = as_json(run("--arch", "9.0", "--json", *arguments))["backends"]
        return str(backends["FLASH_ATTN_MLA"]["by_name_only"])

    assert "only when named" in by_name_only()
    assert by_name_only("--finite-unused") == "None"


def test_layers_of_a_block_decide_for_a_compact_kernel(run: Run) -> None:
    def compact(layers: int) -> bool:
        value = as_json(run("--arch", "10.0", "--block-size", 128, "--layers", layers, "--json"))
        return not any("compact cache" in reason for reason in value["backends"]["CUTLASS_MLA"]["reasons"])

    assert compact(1)
    assert not compact(2)


def test_the_batch_changes_the_order(run: Run) -> None:
    small = as_json(run("--arch", "10.0", "--heads", 16, "--kv-len", 2048, "--json"))
    large = as_json(run("--arch", "10.0", "--heads", 16, "--kv-len", 65536, "--json"))
    assert small["order"][0] == "TRITON_MLA"
    assert small["preference"].startswith("small work")
    assert large["order"][0] == "TOKENSPEED_MLA"
    assert as_json(run("--arch", "9.0", "--json"))["preference"] is None


def test_the_table_gives_every_reason_and_the_pick(run: Run) -> None:
    result = run("--arch", "10.0", "--heads", 256)
    assert result.returncode == 0
    assert result.stderr == ""
    assert "MLA backends for compute capability 10.0" in result.stdout
    for words in (*Backend.__members__, "256 heads are more than 128", "so runs only when named"):
        assert words in result.stdout
    assert "TOKENSPEED_MLA is asked first: from a batch of 8 on" in result.stdout
    assert "picked: " in result.stdout


def test_a_forced_backend(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "flashmla")
    result = run("--arch", "8.0")
    assert result.returncode == 0
    assert "forced by KVTIDE_ATTENTION_BACKEND=flashmla" in result.stdout
    text = " ".join(result.stdout.split())
    assert "picked: none, the attention backend FLASHMLA cannot run this call: this is compute capability 8.0" in text
    value = as_json(run("--arch", "8.0", "--json"))
    assert value["picked"] is None
    assert value["complaint"].startswith("the attention backend FLASHMLA cannot run")
    monkeypatch.setenv(VARIABLE, "flash[mla]")
    assert run().stderr.startswith("kvtide: KVTIDE_ATTENTION_BACKEND 'FLASH[MLA]' is not known; allowed are TORCH")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--arch", "h100"), "--arch 'h100' must be cpu or a compute capability such as 9.0"),
        (("--latent", "576"), "--latent '576' must be two sizes such as 512+64"),
        (("--heads", "0"), "--heads 0 must be from 1 to"),
        (("--window", "-1"), "--window -1 must be from 1 to"),
        (("--block-size", "0"), "--block-size 0 must be"),
        (("--layers", "0"), "--layers 0 must be"),
        (("--format", "int8"), "'int8' is not one of 'bfloat16'"),
        (("--q-len", "x"), "'x' is not a valid integer"),
    ],
)
def test_bad_values_are_one_sentence(run: Run, arguments: tuple[str, ...], sentence: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr


def test_help_teaches_without_torch() -> None:
    done = subprocess.run([COMMAND, "kernels", "--help"], capture_output=True, text=True, check=True)
    assert "Examples:" in done.stdout
    assert VARIABLE in done.stdout
    without = "import sys; sys.modules['torch'] = None; sys.argv = ['kvtide', 'kernels', *sys.argv[1:]]; "
    start = "from kvtide.cli.main import run; run()"
    for arguments, code in (("--help",), 0), ((), 2):
        done = subprocess.run(
            [sys.executable, "-c", without + start, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == code
    assert (
        done.stderr
        == "kvtide: kvtide kernels needs the package 'torch'; install it with: pip install 'kvtide[torch]'\n"
    )
