"""The connector configuration: what it takes, how it is overridden, and what it says about what it does not take."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from typing import Annotated, Any

import msgspec
import pytest

from kvtide.connectors import registry
from kvtide.connectors.config import TransferConfig, load_config, open_store, schema
from kvtide.kvcache import ConfigError
from kvtide.offload.store import Entry, Status, Store, StoreStats


class PlainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    max_bytes: int | str = "1GiB"
    depth: Annotated[int, msgspec.Meta(ge=1, le=9)] = 3
    url: Annotated[str, msgspec.Meta(pattern="^redis")] = "redis://"


class PlainStore(Store):
    Config = PlainConfig

    def __init__(self, config: PlainConfig) -> None:
        self.config = config

    def contains(self, keys: Sequence[bytes]) -> list[Status]:
        return [Status.MISS] * len(keys)

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[Status]:
        return [Status.MISS] * len(keys)

    def put(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[Status]:
        return [Status.REFUSED] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> list[Status]:
        return [Status.MISS] * len(keys)

    def headers(self, keys: Sequence[bytes]) -> list[Any]:
        return [None] * len(keys)

    def scan(self) -> Iterator[Entry]:
        return iter(())

    def stats(self) -> StoreStats:
        return StoreStats()

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def module(monkeypatch):
    module = types.ModuleType("acme_stores")
    module.PlainStore = PlainStore
    module.NoStore = dict
    monkeypatch.setitem(sys.modules, "acme_stores", module)


def plain(**extra):
    return {"kv_connector": "acme_stores:PlainStore", "kv_connector_extra_config": {"path": "/var/kv", **extra}}


def refusal(source, environ=None):
    with pytest.raises(ConfigError) as caught:
        load_config(source, environ=environ or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_json_text_yaml_file_and_mapping_say_the_same(tmp_path):
    data = {**plain(max_bytes="64GiB"), "kv_role": "kv_consumer"}
    (tmp_path / "kv.yaml").write_text(
        "kv_connector: acme_stores:PlainStore\nkv_role: kv_consumer\n"
        "kv_connector_extra_config:\n  path: /var/kv\n  max_bytes: 64GiB\n"
    )
    (tmp_path / "kv.json").write_text(json.dumps(data))
    found = [
        load_config(source, environ={})
        for source in (data, json.dumps(data), tmp_path / "kv.yaml", tmp_path / "kv.json")
    ]
    assert found.count(found[0]) == 4
    assert (found[0].stores, found[0].loads) == (False, True)


def test_a_store_opens_by_class_path_module_path_and_entry_point(monkeypatch):
    by_module = {**plain(), "kv_connector": "PlainStore", "kv_connector_module_path": "acme_stores"}
    entry = EntryPoint("acme", "acme_stores:PlainStore", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda *, group, name=None: [entry] if name in (None, "acme") else [])
    for data in (plain(), by_module, {**plain(), "kv_connector": "acme"}):
        store = open_store(load_config(data, environ={}))
        assert isinstance(store, PlainStore)
        assert store.config == PlainConfig(path="/var/kv")
    assert registry.known_stores()[-1] == "acme"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kv_role": "both"}, "kv_transfer_config: kv_role is 'both'; "),
        ({"kv_rol": "kv_both"}, "has no key 'kv_rol'; allowed are kv_connector, kv_role"),
        ({"kv_rol": "kv_both"}, "did you mean 'kv_role'?"),
        ({"kv_connector": "LMDBConector"}, "did you mean 'LMDBConnector'?"),
        ({"kv_connector": "acme_stores:Gone"}, "module 'acme_stores' has no class 'Gone'"),
        ({"kv_connector": "acme_stores:NoStore"}, "acme_stores:NoStore is not a subclass of"),
        ({"kv_connector": "no_such_module:X"}, "kv_connector_module_path 'no_such_module' cannot be imported"),
        ({"kv_connector": ".:X"}, "kv_connector_module_path '.' cannot be imported"),
        ({"kv_connector": ""}, "kv_connector is ''; "),
        ({"kv_connector": 3}, "kv_connector is 3; expected str"),
        ({"kv_load_failure_policy": "retry"}, "kv_load_failure_policy is 'retry'"),
        ({"kv_connector_extra_config": []}, "kv_connector_extra_config is []; expected object"),
        ({"kv_connector_extra_config": {}}, "kv_connector_extra_config: object missing required field path"),
    ],
)
def test_bad_keys_and_values_are_named(change, expected):
    assert expected in refusal({**plain(), **change})


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"depth": 12}, "acme_stores:PlainStore's kv_connector_extra_config: depth is 12; expected int <= 9"),
        ({"path": 7}, "path is 7; expected str"),
        ({"max_byte": 7}, "has no key 'max_byte'; allowed are path, max_bytes, depth, url; did you mean 'max_bytes'?"),
    ],
)
def test_the_stores_own_settings_are_checked(extra, expected):
    assert expected in refusal(plain(**extra))


def test_a_missing_connector_and_other_documents(tmp_path):
    assert "missing required field kv_connector" in refusal({})
    assert "cannot be read: No such file" in refusal(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "must hold one object" in refusal(tmp_path / "list.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1\nb: 2\n")
    assert "bad.yaml, line 2: is not valid YAML" in refusal(tmp_path / "bad.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "it is not UTF-8 text" in refusal(tmp_path / "binary.yaml")
    assert "is not valid JSON" in refusal('{"kv_connector": }')
    assert "nests too deeply" in refusal('{"a":' + "[" * 100_000)
    assert "cannot be read: Is a directory" in refusal(tmp_path)


def test_a_password_in_a_url_is_never_printed():
    message = refusal(plain(url="http://user:secret@host/0"))
    assert "http://***@host/0" in message
    assert "secret" not in message


def test_environment_overrides():
    environ = {
        "KVTIDE_CONFIG__KV_ROLE": "kv_producer",
        "KVTIDE_CONFIG__KV_CONNECTOR_EXTRA_CONFIG__MAX_BYTES": "64GiB",
        "KVTIDE_CONFIG__KV_CONNECTOR_EXTRA_CONFIG__DEPTH": "5",
        "OTHER": "x",
    }
    data = plain()
    config = load_config(data, environ=environ)
    assert config.kv_role == "kv_producer"
    assert config.kv_connector_extra_config == {"path": "/var/kv", "max_bytes": "64GiB", "depth": 5}
    assert data == plain()  # what was given stays as it was


def test_environment_overrides_reach_into_lists_and_name_the_variable_when_wrong():
    name = "KVTIDE_CONFIG__KV_CONNECTOR_EXTRA_CONFIG__CONNECTORS__{}__KV_CONNECTOR_EXTRA_CONFIG__CAPACITY"
    data = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{"kv_connector": "x"}]}}
    message = refusal(data, {name.format(4): "1"})
    assert message.startswith(f"environment variable {name.format(4)}: '4' is no place of a list of 1")
    assert "names a key inside 'kv_both'" in refusal(
        {**plain(), "kv_role": "kv_both"}, {"KVTIDE_CONFIG__KV_ROLE__DEEPER": "1"}
    )
    assert "has no key 'kv_roll'" in refusal(plain(), {"KVTIDE_CONFIG__KV_ROLL": "kv_both"})


def test_a_config_knows_vllms_other_keys():
    config = load_config({**plain(), "engine_id": "e", "kv_buffer_device": "cpu", "kv_port": 1}, environ={})
    assert config == TransferConfig(**plain(), engine_id="e", kv_buffer_device="cpu", kv_port=1)


def test_the_schema_describes_and_checks_every_store(monkeypatch):
    jsonschema = pytest.importorskip("jsonschema")
    monkeypatch.setattr(registry, "BUILT_IN", {"PlainStore": "acme_stores"})
    found = schema()
    jsonschema.Draft202012Validator.check_schema(found)
    validator = jsonschema.Draft202012Validator(found)
    good = {"kv_connector": "PlainStore", "kv_connector_extra_config": {"path": "/var/kv", "depth": 2}}
    assert validator.is_valid(good)
    assert not validator.is_valid({**good, "kv_role": "both"})
    assert not validator.is_valid({**good, "kv_connector_extra_config": {"path": "/var/kv", "depth": 20}})
    assert not validator.is_valid({**good, "kv_connector_extra_config": {"path": "/var/kv", "unknown": 2}})


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("HostConnector", {"max_bytes": "abc"}, "max_bytes: 'abc' is not a size"),
        ("HostConnector", {"max_bytes": 3}, "max_bytes 3 must be at least 1KiB"),
        ("LMDBConnector", {"path": "/x", "max_bytes": "4KiB"}, "max_bytes '4KiB' must be at least 192KiB"),
        ("HostConnector", {"max_bytes": -5}, "max_bytes: '-5' is not a size"),
        ("HostConnector", {"max_bytes": "1MiB", "eviction": "mru"}, "eviction 'mru' is not known; allowed are lru"),
        ("LMDBConnector", {"path": "/x", "codec": "gzip"}, "codec 'gzip' is not known; allowed are raw"),
        ("LMDBConnector", {"path": "/x", "segment_bytes": "1Gx"}, "segment_bytes: '1Gx' is not a size"),
        ("SharedStorageConnector", {"shared_storage_path": "/x", "min_free_bytes": "0"}, "min_free_bytes: '0' must be"),
        ("NixlConnector", {"plugin": "OBJ"}, "plugin 'OBJ' needs the key 'bucket'"),
        ("NixlConnector", {"path": "/x", "lane_bytes": 5000}, "lane_bytes 5000 must be a multiple of 4KiB"),
        ("NixlPeerConnector", {"address": "a:1", "lane_bytes": 1}, "lane_bytes 1 must be at least 8KiB"),
        ("S3Connector", {"bucket": "b", "multipart_bytes": "1MiB"}, "multipart_bytes '1MiB' must be at least 5MiB"),
        ("MooncakeConnector", {"master_server_address": "a:1", "local_buffer_size": "x"}, "local_buffer_size: 'x' is"),
    ],
)
def test_all_that_needs_no_opening_is_checked_before_it(name, extra, message):
    store = {"kv_connector": name, "kv_connector_extra_config": extra}
    with pytest.raises(ConfigError, match=f"^{name}'s kv_connector_extra_config: {re.escape(message)}"):
        load_config(store, environ={})
    # The same inside a stack, which says which tier it is.
    fine = {"kv_connector": "HostConnector", "kv_connector_extra_config": {"max_bytes": "1MiB"}}
    stack = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [fine, store]}}
    with pytest.raises(ConfigError, match=rf"^MultiConnector's .*: connectors\[1\]: {name}'s .*{re.escape(message)}"):
        load_config(stack, environ={})


def test_a_stack_s_own_settings_are_checked_before_it_is_opened():
    fine = {"kv_connector": "HostConnector", "kv_connector_extra_config": {"max_bytes": "1MiB"}}
    for extra, message in (
        ({"quota_bytes": {"tenant": "much"}}, "quota_bytes: tenant: 'much' is not a size"),
        ({"default_quota_bytes": "much"}, "default_quota_bytes: 'much' is not a size"),
        ({"low_watermark": 0.9}, "low_watermark 0.9 must not be above high_watermark 0.8"),
        ({"connectors": [{**fine, "kv_connector": "HostConector"}]}, "connectors\\[0\\]: .*HostConector"),
    ):
        stack = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [fine], **extra}}
        with pytest.raises(ConfigError, match=message):
            load_config(stack, environ={})


BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 9)}]\n" for i in range(10))
HUGE_HEX = "0x" + "f" * 5000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kv_role: 2024-13-45", "has a value that cannot be read: month must be in 1..12"),
        ("kv_port: " + "9" * 5000, "has a value that cannot be read: Exceeds the limit"),
        ("a\0b: 1", "is not valid YAML: unacceptable character #x0000: special characters are not allowed in"),
        (f"kv_connector: HostConnector\nkv_role: {HUGE_HEX}", "kv_role is a number of 20000 bits"),
        (f"{BOMB}kv_connector: *a9", "has no key 'a0'"),
        ("kv_connector: HostConnector\nkv_role: &a [*a]", "kv_role is [[[["),
        (f"kv_connector: HostConnector\nkv_connector_extra_config: {{max_bytes: {HUGE_HEX}}}", "exceeds the limit"),
    ],
    ids=["date", "digits", "nul", "hex", "aliases", "circle", "setting"],
)
def test_values_that_yaml_makes_of_odd_text(text, expected, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(expected)) as caught:
        load_config(path, environ={})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("KV_ROLE", "2024-13-45", "kv_role is '2024-13-45'"),
        ("KV_ROLE", "[" * 3000, "KVTIDE_CONFIG__KV_ROLE nests too deeply"),
        ("KV_ROLE", HUGE_HEX, "kv_role is a number of 20000 bits"),
        ("KV_CONNECTOR_EXTRA_CONFIG__CONNECTORS__²", "1", "'²' is no place of a list of 1"),
    ],
)
def test_odd_overrides_are_refused(name, value, expected):
    config = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{}]}}
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_config(config, environ={"KVTIDE_CONFIG__" + name: value})


def test_a_document_that_is_taken_for_a_path_is_not_repeated_whole():
    with pytest.raises(ConfigError, match="cannot be read: File name too long") as caught:
        load_config("x" * 5000, environ={})
    assert len(str(caught.value)) < 200
