"""SGLang's controllers with `KvtideHiCacheStorage`: every layout, hybrid pools, ranks, restarts; what shares a page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hicaches import PAGE, HiCaches, lmdb, prompt, shared

POOLS: dict[str, dict[str, Any]] = {
    "page_first": {"layout": "page_first"},
    "page_first, bfloat16": {"layout": "page_first", "dtype": "bfloat16"},
    "page_first_direct": {"layout": "page_first_direct"},
    "page_head": {"layout": "page_head"},
    "layer_first": {"layout": "layer_first"},
    "K and V unequal": {"layout": "page_first", "v_dim": 4},
    "latent": {"kind": "mla", "layout": "page_first", "dtype": "bfloat16"},
    "latent, page_first_direct": {"kind": "mla", "layout": "page_first_direct"},
    "latent, layer_first": {"kind": "mla", "layout": "layer_first"},
}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("zero_copy", [True, False])
def test_pages_come_back_as_they_were(pool: str, zero_copy: bool, hicaches: HiCaches, tmp_path: Path) -> None:
    layout = {"page": 16, **POOLS[pool]}
    tokens = prompt(1, 480)
    first = hicaches.open("first", lmdb(tmp_path), pool=layout, zero_copy=zero_copy)
    assert first.hits(tokens) == (0, 0, 0)
    assert first.write(tokens) == len(tokens)
    first.close()
    second = hicaches.open("second", lmdb(tmp_path), pool=layout, zero_copy=zero_copy)
    assert second.hits(tokens) == (480, 480, 480)
    # And the comparison would notice: other data under the same names is not sound.
    assert second.hits(tokens, data=2) == (480, 480, 0)
    # A shared prefix, to the page; a page that is not whole is no page.
    assert second.hits(tokens[:200] + prompt(2, 100)) == (192, 192, 192)
    assert second.hits(prompt(2, 100)) == (0, 0, 0)
    # What is there already is not written again, and counts as written.
    before = second.counts()
    assert second.write(tokens) == len(tokens)
    assert second.counts().get("save_stored", 0) == before.get("save_stored", 0)
    second.close()


@pytest.mark.parametrize("pool", ["page_first", "layer_first", "latent"])
def test_the_old_interface_of_flat_pages(pool: str, hicaches: HiCaches, tmp_path: Path) -> None:
    tokens = prompt(3, 400)
    cache = hicaches.open("flat", lmdb(tmp_path), pool=POOLS[pool], interface_v1=0)
    assert cache.write(tokens) == 400
    assert cache.hits(tokens + prompt(4, 20)) == (400, 400, 400)
    cache.close()


def test_many_pages_go_in_several_batches(hicaches: HiCaches, tmp_path: Path) -> None:
    tokens = prompt(1, 508)  # 254 pages; SGLang hands over 128 at a time
    cache = hicaches.open("many", lmdb(tmp_path), pool={"page": 2})
    assert cache.write(tokens) == 508
    assert cache.hits(tokens) == (508, 508, 508)
    stats = cache.stats()
    assert stats["prefetched"] == [128, 126]
    assert stats["backed_up"] == [128, 126]
    assert 'sglang:kvtide_total{event="load_hit",pp_rank="0",tp_rank="0"} 508.0' in stats["metrics"]
    assert cache.stats()["prefetched"] == []
    cache.close()


def test_another_process_finds_what_one_has_stored(
    start: Callable[[], HiCaches], hicaches: HiCaches, tmp_path: Path
) -> None:
    cache = hicaches.open("here", lmdb(tmp_path), pool=POOLS["page_first, bfloat16"])
    assert cache.write(prompt(1, 400)) == 400
    cache.close()
    other = start()
    again = other.open("there", lmdb(tmp_path), pool=POOLS["page_first, bfloat16"])
    assert again.hits(prompt(1, 400)) == (400, 400, 400)
    assert "KvtideHiCacheStorage: pool kv, page_first, 768 + 768 bytes a page, rank 0 of 1" in other.said()
    other.kill()


@pytest.mark.parametrize("zero_copy", [True, False])
def test_hybrid_pools_are_hit_where_all_of_them_are(zero_copy: bool, hicaches: HiCaches, tmp_path: Path) -> None:
    hybrid = {"window": 3, "state": True}
    tokens = prompt(1, 400)
    cache = hicaches.open("hybrid", lmdb(tmp_path), pool=hybrid, zero_copy=zero_copy)
    assert cache.write(tokens[:200]) == 200
    assert cache.write(tokens) == 400
    answer = cache.fetch(tokens)
    assert (answer["hit"], answer["sound"], answer["sound_pools"]) == (400, 400, {"swa": 3, "mamba": 1})
    # The state and the window are there where a prompt ended, and nowhere between.
    answer = cache.fetch(tokens[:300])
    assert (answer["hit"], answer["sound"], answer["sound_pools"]) == (200, 200, {"swa": 3, "mamba": 1})
    assert cache.fetch(tokens[:199])["hit"] == 0
    cache.close()
    # A window alone needs its last pages.
    cache = hicaches.open("window", lmdb(tmp_path / "window"), pool={"window": 3}, zero_copy=zero_copy)
    cache.write(tokens[:200])
    assert cache.fetch(tokens)["hit"] == 200
    assert cache.fetch(tokens[: 200 - PAGE])["hit"] == 0
    cache.close()


def test_what_every_rank_holds_alike_is_stored_once(hicaches: HiCaches, tmp_path: Path) -> None:
    tokens = prompt(1, 200)
    ranks = [
        hicaches.open(f"rank {n}", shared(tmp_path / "kv"), pool=POOLS["latent"], rank={"tp_rank": n, "tp_size": 2})
        for n in (0, 1)
    ]
    assert ranks[1].write(tokens) == 0  # SGLang leaves it to the first rank
    assert ranks[1].counts().get("save_stored", 0) == 0
    assert ranks[0].write(tokens) == 200
    for rank in ranks:
        assert rank.hits(tokens) == (200, 200, 200)
        rank.close()
    refused = hicaches.try_open("no", lmdb(tmp_path / "{rank}"), pool=POOLS["latent"], rank={"tp_size": 2})
    assert "the store must be one that all 2 ranks reach" in refused["error"]


def test_heads_of_a_rank_are_its_own(hicaches: HiCaches, tmp_path: Path) -> None:
    tokens = prompt(1, 200)
    store = shared(tmp_path / "kv")
    ranks = [hicaches.open(f"rank {n}", store, rank={"tp_rank": n, "tp_size": 2}) for n in (0, 1)]
    assert ranks[0].write(tokens) == 200
    assert ranks[1].fetch(tokens)["hit"] == 0
    assert ranks[1].write(tokens) == 200
    for rank in ranks:
        assert rank.hits(tokens) == (200, 200, 200)
        rank.close()


def test_ranks_of_another_number_read_split_heads(hicaches: HiCaches, tmp_path: Path) -> None:
    tokens, page_head, store = prompt(1, 200), POOLS["page_head"], shared(tmp_path / "kv")
    two = [
        hicaches.open(f"two {n}", store, pool=page_head, rank={"tp_rank": n, "tp_size": 2}, tp_lcm_size=4)
        for n in (0, 1)
    ]
    four = [
        hicaches.open(f"four {n}", store, pool=page_head, rank={"tp_rank": n, "tp_size": 4}, tp_lcm_size=4)
        for n in range(4)
    ]
    for rank in four:
        rank.write(tokens)
    # What the four have written are the halves of what the two ask for (with bytes of their own in this test).
    for rank in two:
        assert rank.hits(tokens) == (200, 200, 0)
        assert rank.counts()["load_hit"] == 50 * 2 * 2
    for rank in (*two, *four):
        rank.close()


@pytest.mark.parametrize(
    "other",
    [
        {"model": "another"},
        {"weights": "another"},
        {"pool": {"dtype": "float16"}},
        {"pool": {"layout": "page_first_direct"}},
        {"pool": {"layout": "layer_first"}},
        {"rank": {"tp_rank": 0, "tp_size": 2}},
        {"rank": {"tp_rank": 1, "tp_size": 2}},
        {"pool": {"kind": "mla"}},
        {"interface_v1": 0},
    ],
    ids=str,
)
def test_nothing_else_shares_a_page(other: dict[str, Any], hicaches: HiCaches, tmp_path: Path) -> None:
    tokens = prompt(1, 200)
    one = hicaches.open("one", shared(tmp_path / "kv"))
    assert one.write(tokens) == 200
    two = hicaches.open("two", shared(tmp_path / "kv"), **other)
    assert two.fetch(tokens)["hit"] == 0
    assert one.fetch(tokens)["hit"] == 200
    one.close()
    two.close()


def test_salts_share_nothing(hicaches: HiCaches, tmp_path: Path) -> None:
    cache = hicaches.open("salts", lmdb(tmp_path))
    assert cache.write(prompt(1, 200), salt="a") == 200
    assert cache.fetch(prompt(1, 200), salt="a")["hit"] == 200
    assert cache.fetch(prompt(1, 200), salt="b")["hit"] == 0
    assert cache.fetch(prompt(1, 200))["hit"] == 0
    cache.close()


def test_weights_are_named_by_what_they_are_not_by_what_they_are_served_as(hicaches: HiCaches, tmp_path: Path) -> None:
    tokens, store = prompt(1, 200), shared(tmp_path / "kv")
    servers: dict[str, dict[str, Any]] = {}
    for name, content in (("one", bytes(9999)), ("copy", bytes(9999)), ("two", bytes(9998) + b"x")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
        servers[name] = {"model_path": str(tmp_path / name)}
    servers["quantized"] = {**servers["one"], "quantization": "fp8"}
    servers["dummy"] = {**servers["one"], "load_format": "dummy"}
    one = hicaches.open("one", store, server=servers["one"])
    assert one.write(tokens) == 200
    one.close()
    for name, server in servers.items():
        other = hicaches.open("other", store, server=server, model="m" if name != "copy" else "served as another")
        assert other.fetch(tokens)["hit"] == (200 if name in ("one", "copy") else 0), name
        other.close()


def test_clear_leaves_other_models_alone(hicaches: HiCaches, tmp_path: Path) -> None:
    tokens = prompt(1, 200)
    one = hicaches.open("one", shared(tmp_path / "kv"), pool={"window": 2})
    two = hicaches.open("two", shared(tmp_path / "kv"), model="another")
    one.write(tokens)
    two.write(tokens)
    assert one.clear()
    assert one.fetch(tokens)["hit"] == 0
    assert two.fetch(tokens)["hit"] == 200
    one.close()
    two.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stagin_bytes": 1}, "did you mean 'staging_bytes'"),
        ({"store": {"kv_connector": "LMDBConector"}}, "did you mean 'LMDBConnector'"),
        ({"staging_bytes": "8KiB", "pool": {"page": 64}}, "staging_bytes must be at least 49152"),
    ],
    ids=str,
)
def test_a_bad_configuration_is_one_sentence(
    settings: dict[str, Any], said: str, hicaches: HiCaches, tmp_path: Path
) -> None:
    answer = hicaches.try_open("bad", **{"store": shared(tmp_path / "kv"), **settings})
    assert said in answer["error"]
