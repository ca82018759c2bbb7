"""The bridge's settings: one store's configuration inside vLLM's, checked to the last key."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtide.connectors.per_rank import is_private, is_shared
from kvtide.connectors.vllm_bridge.settings import read_settings, store_config
from kvtide.connectors.weight_files import sample_files
from kvtide.kvcache import ConfigError

LMDB = {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": "/var/kv/{rank}"}}


def test_rank_stands_for_the_worker() -> None:
    settings = read_settings({"store": LMDB})
    assert store_config(settings, rank=3).kv_connector_extra_config == {"path": "/var/kv/3"}
    assert is_private(settings.store)


def test_what_is_private() -> None:
    shared = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": "/kv"}}
    host = {"kv_connector": "HostConnector", "kv_connector_extra_config": {"max_bytes": "1GiB"}}
    stack = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [host, shared]}}
    assert (is_private(shared), is_shared(shared)) == (False, True)
    assert (is_private(host), is_shared(host)) == (True, False)
    assert (is_private(stack), is_shared(stack)) == (True, True)
    assert (is_private(LMDB), is_shared(LMDB)) == (True, False)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "store"),
        ({"store": LMDB, "stagin_bytes": 1}, "did you mean 'staging_bytes'"),
        ({"store": {"kv_connector": "LMDBConector"}}, "did you mean 'LMDBConnector'"),
        ({"store": {**LMDB, "kv_connector_extra_config": {"pth": "/x"}}}, "pth"),
        ({"store": LMDB, "look_up_timeout_s": 0}, "look_up_timeout_s is 0"),
        ({"store": LMDB, "window_interval": -1}, "window_interval is -1"),
        ({"store": LMDB, "staging_bytes": "much"}, "much"),
    ],
)
def test_errors_name_what_is_wrong(config: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_settings(config)


def test_other_weights_in_the_same_place_have_another_name(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(100_000))
    before = sample_files(tmp_path)
    assert sample_files(tmp_path) == before
    file.write_bytes(bytes(99_999) + b"\1")
    assert sample_files(tmp_path) != before
