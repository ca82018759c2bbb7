"""`kvtide store` as an administrator runs it: on real stores, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.connectors.config import make_store
from kvtide.offload.keys import store_key
from kvtide.offload.store import Status

KVTIDE = Path(sys.executable).with_name("kvtide")
SPACE = bytes(range(16))
VALUES = {store_key(SPACE, bytes([n]) * 16): bytes([n]) * (1000 + n) for n in range(5)}
STORES = {
    "SharedStorageConnector": "shared_storage_path",
    "LMDBConnector": "path",
}


def kvtide(*arguments):
    return subprocess.run([KVTIDE, "store", *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(params=STORES)
def config(request, tmp_path):
    """A store with five values, closed, as configuration text."""
    extra = {STORES[request.param]: str(tmp_path / "kv")}
    if request.param == "LMDBConnector":
        extra["max_bytes"] = "64MiB"
    with make_store(request.param, extra) as store:
        assert store.put(list(VALUES), list(VALUES.values())) == [Status.STORED] * 5
    return json.dumps({"kv_connector": request.param, "kv_connector_extra_config": extra})


def damage(config: str) -> None:
    """Flip one payload byte of the value of n = 3, wherever the store keeps it."""
    (folder,) = [
        value for value in json.loads(config)["kv_connector_extra_config"].values() if Path(value).is_absolute()
    ]
    wanted = b"\x03" * 1003
    for path in Path(folder).rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(wanted)) >= 0:
            with path.open("r+b") as file:
                file.seek(at + 500)
                file.write(b"\xff")
            return
    raise AssertionError("the value was not found in any file")


def test_stat(config):
    done = kvtide("stat", config)
    assert (done.returncode, done.stderr) == (0, "")
    (row,) = json.loads(kvtide("stat", "--json", config).stdout)
    assert row["num_values"] == 5
    assert row["num_bytes"] >= sum(map(len, VALUES.values())) + 5 * 96
    assert row["store"] in done.stdout


def test_ls(config):
    rows = [json.loads(line) for line in kvtide("ls", "--json", config).stdout.splitlines()]
    assert {row["key"] for row in rows} == {key.hex() for key in VALUES}
    assert len(kvtide("ls", "--limit", "2", config).stdout.splitlines()) == 2
    assert len(kvtide("ls", "--space", SPACE.hex()[:8], config).stdout.splitlines()) == 5
    assert kvtide("ls", "--space", "ff", config).stdout == ""
    refused = kvtide("ls", "--space", "xyz", config)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "kvtide: --space 'xyz' must be at most 32 hex digits\n"


def test_verify_finds_and_removes_what_is_corrupt(config):
    done = kvtide("verify", config)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("5 values are intact, 0 were corrupt")
    damage(config)
    done = kvtide("verify", "--json", config)
    assert done.returncode == 1
    assert json.loads(done.stdout) == {
        "intact": 4,
        "corrupt": 1,
        "unreadable": 0,
        "bad_keys": [store_key(SPACE, b"\x03" * 16).hex()],
    }
    assert json.loads(kvtide("verify", "--json", config).stdout)["intact"] == 4


def test_explain(config):
    key = store_key(SPACE, b"\x02" * 16)
    (answer,) = json.loads(kvtide("explain", "--json", config, key.hex()).stdout)
    assert (answer["status"], answer["raw_bytes"], answer["codec"]) == ("intact", 1002, 0)
    damage(config)
    assert "corrupt" in kvtide("explain", config, store_key(SPACE, b"\x03" * 16).hex()).stdout
    other = kvtide("explain", config, store_key(SPACE, b"\x09" * 16).hex()).stdout
    assert "miss" in other
    assert "5 values of the same space are there: the tokens" in other
    assert "model, dtype, layers or block differ" in kvtide("explain", config, "ab" * 32).stdout
    refused = kvtide("explain", config, "abc")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "KEY 'abc' has 3 hex digits; a key has 64" in refused.stderr


def test_gc_and_bench_leave_the_values_as_they_were(config):
    assert kvtide("gc", config).returncode == 0
    done = kvtide("bench", config, "--size", "64KiB", "--total", "1MiB", "--json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert [(row["operation"], row["values"], row["not_served"]) for row in result["operations"]] == [
        ("put", 16, 0),
        ("lookup", 16, 0),
        ("get", 16, 0),
    ]
    (row,) = json.loads(kvtide("stat", "--json", config).stdout)
    assert row["num_values"] == 5


def test_a_store_that_is_not_there_is_one_line(tmp_path):
    config = {
        "kv_connector": "LMDBConnector",
        "kv_connector_extra_config": {"path": "/proc/no/such", "max_bytes": "1GiB"},
    }
    done = kvtide("stat", json.dumps(config))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvtide: ")
    assert done.stderr.count("\n") == 1


def test_looking_into_a_stack_works_beside_the_engine_that_writes_to_it(tmp_path):
    tiers = [
        {"kv_connector": "HostConnector", "kv_connector_extra_config": {"max_bytes": "16MiB"}},
        {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": str(tmp_path / "kv")}},
    ]
    config = json.dumps({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": tiers}})
    key = next(iter(VALUES))
    with make_store("MultiConnector", {"connectors": tiers}) as engine:
        assert engine.put([key], [VALUES[key]]) == [Status.STORED]
        rows = json.loads(kvtide("stat", "--json", config).stdout)
        assert [row["num_values"] for row in rows] == [0, 1]
        assert kvtide("ls", config).stdout.startswith(key.hex())
        assert "intact" in kvtide("explain", config, key.hex()).stdout
        refused = kvtide("gc", config)
        assert refused.returncode == 2
        assert "is being written by process" in refused.stderr
    assert kvtide("gc", config).returncode == 0
