"""The SGLang bridge's settings, beside SGLang's own keys."""

from __future__ import annotations

from typing import Any

import pytest

from kvtide.connectors.sglang_bridge.settings import read_settings, store_config
from kvtide.kvcache import ConfigError

LMDB = {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": "/var/kv/{rank}"}}
HOST = {"kv_connector": "HostConnector", "kv_connector_extra_config": {"max_bytes": "1GiB"}}
SHARED = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": "/kv"}}


def stack(*tiers: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(tiers)}}


def test_keys_of_sglang_are_left_alone() -> None:
    settings = read_settings({"backend_name": "kvtide", "module_path": "m", "interface_v1": 1, "store": LMDB})
    assert store_config(settings, rank=5).kv_connector_extra_config == {"path": "/var/kv/5"}


@pytest.mark.parametrize(
    ("store", "zero_copy"),
    [(LMDB, True), (HOST, True), (SHARED, False), (stack(HOST, LMDB), True), (stack(HOST, SHARED), False)],
)
def test_only_stores_at_hand_are_copied_to_directly(store: dict[str, Any], zero_copy: bool) -> None:
    assert read_settings({"store": store}).is_zero_copy is zero_copy
    assert read_settings({"store": store, "zero_copy": not zero_copy}).is_zero_copy is not zero_copy


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "store"),
        ({"store": LMDB, "stagin_bytes": 1}, "did you mean 'staging_bytes'"),
        ({"store": {**LMDB, "kv_connector_extra_config": {"pth": "/x"}}}, "pth"),
        ({"store": LMDB, "transfer_timeout_s": 0}, "transfer_timeout_s is 0"),
        ({"store": LMDB, "staging_bytes": "much"}, "much"),
        ({"store": LMDB, "zero_copy": "yes"}, "zero_copy is 'yes'"),
    ],
)
def test_errors_name_what_is_wrong(config: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_settings(config)
