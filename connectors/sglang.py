"""`KvtideHiCacheStorage`: any kvtide store behind SGLang's hierarchical cache, hybrid pools included.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "kvtide", "module_path": "kvtide.connectors.sglang",
            "class_name": "KvtideHiCacheStorage", "interface_v1": 1,
            "store": {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": "/var/kv"}}}'

SGLang makes one in each scheduler process and calls it from its storage threads, which wait for every call. This file
is the seam: it translates the calls, and says what names the weights. Written for SGLang 0.5.23; this module alone in
kvtide imports SGLang. Settings, pages and keys, deadlines: `sglang_bridge`.
"""

from __future__ import annotations

import atexit
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (  # type: ignore[import-not-found]
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics  # type: ignore[import-not-found]
from sglang.srt.runtime_context import get_model, get_spec  # type: ignore[import-not-found]

from kvtide.kvcache import ConfigError
from kvtide.offload.store import Status

from .config import open_store
from .per_rank import is_shared
from .sglang_bridge.page_io import PageTransfers
from .sglang_bridge.pages import PoolPages, Run, Shard, leading, whole_pages
from .sglang_bridge.settings import read_settings, store_config
from .weight_files import sample_files

logger = logging.getLogger(__name__)

_METRIC = "sglang:kvtide"
_KEPT = (Status.STORED, Status.PRESENT)


class KvtideHiCacheStorage(HiCacheStorage):  # type: ignore[misc]
    """See the module. `counts` has everything since the start: pages looked up, values and bytes, faults."""

    _metric: Any = None

    def __init__(self, storage_config: HiCacheStorageConfig, _: Any = None) -> None:
        extra_config = storage_config.extra_config or {}
        settings = read_settings(extra_config)
        self._config = storage_config
        self._by_page = bool(extra_config.get("interface_v1", 0))
        if storage_config.is_mla_model and storage_config.tp_size > 1 and not is_shared(settings.store):
            raise ConfigError(
                "KvtideHiCacheStorage: SGLang stores this model's KV on its first rank alone, so the store must be one "
                f"that all {storage_config.tp_size} ranks reach, at least in its last tier; this one is each rank's own"
            )
        self._weights = _weights_name(settings.weights, storage_config.model_name)
        self._shard = _shard(storage_config)
        self._pages: dict[str, PoolPages] = {}
        self._kv: PoolPages | None = None
        self._flat: PoolPages | None = None
        self._pool: Any = None
        self._kv_is_logical = False
        self._rates: dict[str, list[tuple[int, float]]] = {"load": [], "save": []}
        self._reported: Counter[str] = Counter()
        self._io = PageTransfers(
            open_store(store_config(settings, rank=_rank(storage_config))),
            zero_copy=settings.is_zero_copy,
            staging_bytes=settings.staging_size,
            threads=settings.io_threads,
            look_up_timeout_s=settings.look_up_timeout_s,
            transfer_timeout_s=settings.transfer_timeout_s,
        )
        atexit.register(self.close)
        logger.info(
            "KvtideHiCacheStorage: store %s, %s, weights %s",
            self._io.store.name,
            "zero copy" if settings.is_zero_copy else "through staging memory",
            self._weights,
        )

    # Pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._pool = mem_pool_host
        self._kv_is_logical = getattr(mem_pool_host, "kv_buffer", mem_pool_host) is None
        if not self._kv_is_logical:
            split = self._config.tp_lcm_size // self._config.tp_size if self._config.should_split_heads else 1
            self._flat = self._make_pages(PoolName.KV, mem_pool_host, flat=True)
            self._kv = self._make_pages(PoolName.KV, mem_pool_host, split) if self._by_page else self._flat
            self._pages[PoolName.KV] = self._kv
            self._accept(self._kv)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            self._pages[host_pool_name] = self._make_pages(host_pool_name, host_pool)
            self._accept(self._pages[host_pool_name])

    # The hybrid interface: several pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        # Where KV is but a name for other pools' pages, those alone say what is there.
        num_pages = self._num_leading(keys) if self._kv is not None else len(keys) if pool_transfers else 0
        hits = {PoolName.KV: num_pages} if num_pages else {}
        restorable = list(range(1, num_pages + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # says nothing about what can be restored, and what is not reported is not loaded
            found = self._are_there(transfer.name, keys[:num_pages])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                ends = list(range(1, leading(found) + 1))
            else:
                ends = _ends_of_windows(found, len(transfer.keys or ()))
            if ends:
                hits[transfer.name] = max(ends)
            allowed = set(ends)
            restorable = [end for end in restorable if end in allowed]
        return PoolTransferResult(max(restorable, default=0), hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._move("load", self._pages.get(t.name), t.keys or [], t.host_indices) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._move("save", self._pages.get(t.name), t.keys or [], t.host_indices) for t in transfers}

    # The page interface ("interface_v1": 1): KV pages, in place

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return [True] * len(keys) if self._kv_is_logical else self._move("load", self._kv, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return [True] * len(keys) if self._kv_is_logical else self._move("save", self._kv, keys, host_indices)

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._num_leading(keys) if self._kv is not None else 0

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # The old interface: pages as flat tensors, of which K comes before V

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        if self._flat is None:
            return [None] * len(keys)
        targets = target_locations or [self._pool.get_dummy_flat_data_page() for _ in keys]
        found = self._run("load", self._flat, keys, [_memory_of(target) for target in targets])
        return [target if there else None for target, there in zip(targets, found, strict=True)]

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        if self._flat is None or values is None:
            return False
        pages = [value.contiguous() for value in values]  # held until the call is over
        return all(self._run("save", self._flat, keys, [_memory_of(page) for page in pages]))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], None if value is None else [value])

    # Upkeep

    def clear(self) -> bool:
        """Delete this model's pages, of all pools of this rank; what else lies in the store stays."""
        everything = [*self._pages.values(), *([] if self._flat is None else [self._flat])]
        spaces = frozenset().union(*(pages.spaces for pages in everything))
        done = self._io.clear(spaces)
        if not done:
            logger.error("KvtideHiCacheStorage: the store has not deleted all pages")
        return done

    @property
    def counts(self) -> Counter[str]:
        return self._io.counts

    def get_stats(self) -> StorageMetrics | None:
        if not self._config.enable_storage_metrics:
            return None
        self._count_in_prometheus()
        stats = StorageMetrics()
        for what, name in (("load", "prefetch"), ("save", "backup")):
            rates, self._rates[what] = self._rates[what], []
            getattr(stats, f"{name}_pgs").extend(pages for pages, _ in rates)
            getattr(stats, f"{name}_bandwidth").extend(rate for _, rate in rates)
        return stats

    def close(self) -> None:
        atexit.unregister(self.close)
        self._io.close()

    def _make_pages(self, name: str, pool: Any, split: int = 1, *, flat: bool = False) -> PoolPages:
        replicated = self._config.is_mla_model and not _is_cut_by_heads(name, pool)
        return PoolPages(
            str(name),
            pool,
            weights=self._weights,
            shard=self._shard,
            replicated=replicated,
            split=split,
            page_tokens=self._pool.page_size,
            flat=flat,
        )

    def _accept(self, pages: PoolPages) -> None:
        for num_bytes in pages.value_bytes:
            self._io.check_value(num_bytes)
        logger.info(
            "KvtideHiCacheStorage: pool %s, %s, %s bytes a page, %s",
            pages.name,
            pages.layout,
            " + ".join(map(str, pages.value_bytes)),
            "alike on all ranks" if pages.is_replicated else f"rank {self._shard.tp_rank} of {self._shard.tp_size}",
        )

    def _num_leading(self, keys: list[str]) -> int:
        return leading(self._are_there(PoolName.KV, keys))

    def _are_there(self, name: str, keys: list[str]) -> list[bool]:
        pages = self._pages.get(name)
        if pages is None:
            return [False] * len(keys)
        statuses = self._io.look_up(pages.keys(keys))
        found = whole_pages([status is Status.HIT for status in statuses], pages.values_per_page)
        if name == PoolName.KV:
            hits = leading(found)
            self._io.count("look_up_hit_pages", hits)
            self._io.count("look_up_miss_pages", len(keys) - hits)
        return found

    def _move(self, what: str, pages: PoolPages | None, keys: Sequence[str], host_indices: Any) -> list[bool]:
        if pages is None or host_indices is None or len(host_indices) != len(keys) * pages.page_slots:
            self._io.count("fault: pages do not match their names", len(keys))
            return [False] * len(keys)
        return self._run(what, pages, keys, pages.values(host_indices) if keys else [])

    def _run(self, what: str, pages: PoolPages, keys: Sequence[str], values: Sequence[Sequence[Run]]) -> list[bool]:
        start = time.perf_counter()
        if what == "load":
            sound = [status is Status.HIT for status in self._io.load(pages.keys(keys), values)]
        else:
            sound = [status in _KEPT for status in self._io.save(pages.keys(keys), values)]
        done = whole_pages(sound, pages.values_per_page)
        if self._config.enable_storage_metrics and any(done):
            seconds = time.perf_counter() - start
            self._rates[what].append((sum(done), sum(done) * pages.page_bytes / seconds / 1e9))
        return done

    def _count_in_prometheus(self) -> None:
        labels = {"tp_rank": str(self._config.tp_rank), "pp_rank": str(self._config.pp_rank)}
        if KvtideHiCacheStorage._metric is None:
            # Not before: what SGLang exports is fixed by an environment variable that it sets on starting.
            import prometheus_client

            KvtideHiCacheStorage._metric = prometheus_client.Counter(
                _METRIC, "What KvtideHiCacheStorage did, by event.", [*labels, "event"]
            )
        counts = self.counts
        for event, number in (counts - self._reported).items():
            self._metric.labels(**labels, event=event).inc(number)
        self._reported = counts


def _ends_of_windows(found: Sequence[bool], window: int) -> list[int]:
    """Prefix lengths whose last `window` pages, at least one, are all there."""
    ends, run = [], 0
    for number, there in enumerate(found, 1):
        run = run + 1 if there else 0
        if run >= min(max(1, window), number):
            ends.append(number)
    return ends


def _memory_of(page: torch.Tensor) -> list[Run]:
    if not page.is_contiguous():
        raise ConfigError(f"a flat page is a contiguous tensor, not one of strides {page.stride()}")
    return [Run(page.data_ptr(), page.numel() * page.element_size())]


def _shard(config: HiCacheStorageConfig) -> Shard:
    context = {name: getattr(config, name) for name in ("attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size")}
    alone = config.attn_cp_size == 1 and config.dcp_size == 1
    return Shard(config.tp_rank, config.tp_size, "" if alone else json.dumps(context))


def _rank(config: HiCacheStorageConfig) -> int:
    stage: int = config.dp_rank * config.pp_size + config.pp_rank
    rank: int = (stage * config.attn_cp_size + config.attn_cp_rank) * config.tp_size + config.tp_rank
    return rank


def _is_cut_by_heads(name: str, pool: Any) -> bool:
    """Whether a pool of a model whose KV is alike on all ranks is not: states, and drafts of another architecture."""
    drafts = name in (PoolName.DRAFT, PoolName.DRAFT_SWA)
    return name == PoolName.MAMBA or (
        drafts and any(kind.__name__ == "MHATokenToKVPoolHost" for kind in type(pool).__mro__)
    )


def _weights_name(given: str | None, served_name: str | None) -> str:
    """The name of the weights, with what else changes the values: quantization, formats, the draft's weights."""
    try:
        model, spec = get_model(), get_spec()
    except ValueError:  # SGLang has published no configuration: some other program drives its cache
        return json.dumps([given if given is not None else _identity(served_name or "", None)])
    fields = ("quantization", "kv_cache_dtype", "dtype", "json_model_override_args")
    draft = getattr(spec, "speculative_draft_model_path", None)
    name = given
    if name is None and getattr(model, "load_format", None) == "dummy":
        name = f"{model.model_path} dummy"  # random, but the same in every process
    parts = [_identity(model.model_path, model.revision) if name is None else name]
    parts += [str(getattr(model, field, None)) for field in fields]
    parts += [_identity(draft, getattr(spec, "speculative_draft_model_revision", None)) if draft else ""]
    return json.dumps(parts)


def _identity(path: str, revision: str | None) -> str:
    local = Path(path)
    if local.is_dir():
        return f"files {sample_files(local)}"
    if local.is_file():
        return f"file {sample_files(local.parent)}"
    with suppress(Exception):  # what it raises on names that are none of the hub's differs between versions
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, "config.json", revision=revision)
        if isinstance(found, str):
            return f"{path}@{Path(found).parent.name}"  # snapshots/COMMIT/config.json
    return f"{path}@{revision or ''}"
