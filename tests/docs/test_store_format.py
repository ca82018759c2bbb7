"""The store format's page, read as somebody would who has nothing else: its tables against what kvtide writes."""

from __future__ import annotations

import re
from hashlib import blake2b
from pathlib import Path

import lmdb
import numpy as np
import pytest
import xxhash

from kvtide.connectors.config import make_store
from kvtide.connectors.segment_store.segments import slot_bytes
from kvtide.hma import HybridMemoryManager, Item
from kvtide.kvcache import FullAttention, Layer, ModelLayout
from kvtide.offload.codecs import CODECS, codec_named
from kvtide.offload.conformance import key_of, value_of
from kvtide.offload.keys import HeadPart, ValueSpace
from kvtide.offload.sealing import seal

PAGE = (Path(__file__).parents[2] / "docs/reference/store-format.md").read_text()


def table(name: str) -> dict[str, tuple[int, int]]:
    """Field by field, offset and bytes of a table that is marked for this test."""
    _, _, rest = PAGE.partition(f"<!-- {name}: a test reads this table -->")
    assert rest, f"the page has no table {name}"
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\w+) \|", rest.partition("\n\n|")[2].partition("\n\n")[0], re.MULTILINE)
    return {field: (int(offset), int(size)) for offset, size, field in rows}


def fields(data: bytes, name: str) -> dict[str, bytes]:
    return {field: data[offset : offset + size] for field, (offset, size) in table(name).items()}


def number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def check_value(data: bytes, key: bytes, value: bytes) -> None:
    """Everything that the page says of a raw value, from bytes alone."""
    found = fields(data, "value-header")
    assert found["magic"] == b"KVTV"
    assert number(found["version"]) == 1
    assert number(found["codec"]) == 0
    assert number(found["raw_bytes"]) == number(found["stored_bytes"]) == len(value)
    assert found["key"] == key
    assert number(found["reserved"]) == 0
    payload = data[96 : 96 + len(value)]
    assert payload == value
    assert found["payload_digest"] == xxhash.xxh3_128(payload).digest()
    assert number(found["checksum"]) == xxhash.xxh3_64(data[:88]).intdigest()


@pytest.mark.parametrize(("name", "total"), [("value-header", 96), ("index-entry", 24)])
def test_tables_leave_no_gap(name: str, total: int) -> None:
    end = 0
    for offset, size in table(name).values():
        assert offset == end
        end = offset + size
    assert end == total


@pytest.mark.parametrize("size", [1, 4096, 70_001])
def test_a_value_reads_as_the_page_says(size: int) -> None:
    key = key_of(size)
    value = value_of(key, size)
    check_value(b"".join(seal(key, memoryview(value))), key, value)


def test_codecs_have_the_numbers_of_the_page() -> None:
    rows = PAGE.partition("| codec | name |")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| (\d) \| (\w+) \|", rows, re.MULTILINE)
    assert [name for _, name in listed] == list(CODECS)
    for digit, name in listed:
        if name in ("zstd", "lz4"):
            pytest.importorskip({"zstd": "zstandard", "lz4": "lz4"}[name])
        codec = codec_named(name)
        assert (0 if codec is None else codec.number) == int(digit)


def test_zstd_splits_even_and_odd_bytes() -> None:
    zstandard = pytest.importorskip("zstandard")
    value = bytes(range(256)) * 16 + b"x"
    header, payload = seal(key_of(1), memoryview(value), codec_named("zstd"))
    assert number(fields(header, "value-header")["codec"]) == 1
    split = zstandard.ZstdDecompressor().decompress(bytes(payload))
    assert split == value[0:-1:2] + value[1:-1:2] + value[-1:]


@pytest.mark.parametrize("stored", [1, 4096, 4097, 32_768, 65_537, 1_000_000, (4 << 20) + 1])
def test_slots_have_the_length_of_the_page(stored: int) -> None:
    most = max(stored, 4096)
    step = max(4096, 2 ** ((most - 1).bit_length() - 4))
    assert slot_bytes(stored) == -(-most // step) * step + 4096


def test_an_lmdb_store_is_what_the_page_shows(tmp_path: Path) -> None:
    sizes = [100, 5000, 200_000]
    keys = [key_of(i) for i in range(len(sizes))]
    values = [value_of(key, size) for key, size in zip(keys, sizes, strict=True)]
    with make_store("LMDBConnector", {"path": str(tmp_path / "kv"), "max_bytes": "64MiB"}) as store:
        store.put(keys, values)
    root = tmp_path / "kv"
    assert {path.name for path in root.iterdir()} == {"format-1", "writer.lock", "state.json", "index", "segments"}
    segments = {}
    for path in (root / "segments").iterdir():
        match = re.fullmatch(r"([0-9a-f]{8})-([0-9a-f]+)-([0-9a-f]+)\.segment", path.name)
        assert match is not None, path.name
        place, length, slots = (int(part, 16) for part in match.groups())
        assert path.stat().st_size == slots * length + -(-4 * slots // 4096) * 4096
        segments[place] = (path.read_bytes(), length)
    with lmdb.open(str(root / "index"), readonly=True) as env, env.begin() as txn:
        entries = dict(txn.cursor())
    assert set(entries) == set(keys)
    for key, value in zip(keys, values, strict=True):
        entry = {name: number(part) for name, part in fields(entries[key], "index-entry").items()}
        data, length = segments[entry["segment"]]
        slot = data[entry["slot"] * length :][:length]
        check_value(slot, key, value)
        assert number(fields(slot, "value-header")["generation"]) == entry["generation"]
        assert entry["stored_bytes"] == len(value)
        assert length == slot_bytes(len(value))


def test_a_shared_tree_is_what_the_page_shows(tmp_path: Path) -> None:
    key = key_of(7)
    value = value_of(key, 9000)
    with make_store("SharedStorageConnector", {"shared_storage_path": str(tmp_path)}) as store:
        store.put([key], [value])
    space, chain = key.hex()[:32], key.hex()[32:]
    path = tmp_path / "kvtide-1" / space / chain[:3] / f"{chain}.kv"
    data = path.read_bytes()
    assert len(data) == 96 + len(value)
    check_value(data, key, value)
    files = [found for found in tmp_path.rglob("*") if found.is_file()]
    assert files == [path]


def test_names_in_services_are_those_of_the_page() -> None:
    from kvtide.connectors.config import schema

    definitions = schema()["$defs"]
    for name, prefix in (("RedisConfig", "kvtide:"), ("S3Config", "kvtide/"), ("NixlConfig", "kvtide/")):
        assert definitions[name]["properties"]["prefix"]["default"] == prefix
        assert f"`{name.replace('Config', 'Connector')}`" in PAGE
    assert definitions["MooncakeConfig"]["properties"]["prefix"]["default"] == "kvtide/"


def framed(*parts: str | bytes) -> bytes:
    data = [part.encode() if isinstance(part, str) else part for part in parts]
    return b"".join(len(part).to_bytes(8, "little") + part for part in data)


def test_a_space_is_hashed_as_the_page_says() -> None:
    spec = FullAttention(num_kv_heads=8, head_dim=128, head_dim_v=128)
    space = ValueSpace(
        model="m",
        revision="r",
        layer_spec=repr(spec),
        layers=(0, 5),
        heads=HeadPart(1, 2),
        block_tokens=16,
        hash_key=b"k",
    )
    by_hand = blake2b(framed("m", "r", repr(spec), "0,5", "1/2", "16") + b"k", digest_size=16, person=b"kvtide-space")
    assert space.digest() == by_hand.digest()
    # The number itself, so that a change of how specs are printed is noticed: it would make every stored value a miss.
    assert repr(spec) == "FullAttention(num_kv_heads=8, head_dim=128, head_dim_v=128, dtype='bfloat16')"


def test_a_chain_is_hashed_as_the_page_says() -> None:
    spec = FullAttention(num_kv_heads=1, head_dim=64, head_dim_v=64)
    layout = ModelLayout("one", (Layer(0, spec),), max_model_len=1024)
    manager = HybridMemoryManager(layout, "8MiB", max_requests=1, model_id="m", hash_key=b"h", key_space=b"space")
    tokens = np.arange(100, 180)
    row = manager.admit("a", tokens, salt="s", adapter="lora", items=[Item(20, b"digest")]).row
    keys = manager.keys(row, 0, 5)

    def namespace(*parts: str | bytes) -> bytes:
        return blake2b(framed(*parts), digest_size=32, person=b"kvtide-namespace").digest()

    def ints(*values: int) -> bytes:
        return b"".join(value.to_bytes(4, "little", signed=True) for value in values)

    inner = namespace("m", b"space", b"h")
    chain = blake2b(namespace(inner, "s", "lora"), digest_size=16, person=b"kvtide-block-key")
    for block in range(5):
        if block == 1:
            chain.update(ints(-1, 20, 6) + b"digest")
        chain.update(ints(*tokens[block * 16 : block * 16 + 16].tolist()))
        assert keys[block] == chain.digest()
