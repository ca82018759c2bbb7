"""`kvtide config` as its user runs it: a process, its output, its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

KVTIDE = Path(sys.executable).with_name("kvtide")


def kvtide(*arguments, **environ):
    return subprocess.run(
        [KVTIDE, "config", *arguments], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **environ}
    )


def test_check_says_that_a_file_is_valid_and_shows_defaults(tmp_path):
    file = tmp_path / "kv.yaml"
    file.write_text(f"kv_connector: LMDBConnector\nkv_connector_extra_config: {{path: {tmp_path / 'store'}}}\n")
    done = kvtide("check", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert "the configuration is valid" in done.stdout
    assert f"path: {tmp_path / 'store'}\n" in done.stdout
    assert not (tmp_path / "store").exists()  # checking opens nothing


def test_check_opens_on_request(tmp_path):
    config = {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": str(tmp_path / "store")}}
    done = kvtide("check", "--open", "--json", json.dumps(config))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["opened"] is True
    assert (tmp_path / "store").is_dir()


def test_check_names_what_is_wrong_in_one_line_and_exits_with_2(tmp_path):
    done = kvtide("check", '{"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"pth": "x"}}')
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvtide: LMDBConnector's kv_connector_extra_config has no key 'pth'; allowed are ")
    assert done.stderr.count("\n") == 1


def test_check_applies_the_environment(tmp_path):
    config = json.dumps({"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": "x"}})
    done = kvtide("check", "--json", config, KVTIDE_CONFIG__KV_ROLE="kv_producer")
    assert json.loads(done.stdout)["config"]["kv_role"] == "kv_producer"


def test_schema_is_json_and_names_every_store():
    done = kvtide("schema")
    assert done.returncode == 0, done.stderr
    names = [branch["if"]["properties"]["kv_connector"]["const"] for branch in json.loads(done.stdout)["allOf"]]
    assert {"HostConnector", "LMDBConnector", "SharedStorageConnector", "RedisConnector", "MultiConnector"} <= set(
        names
    )
