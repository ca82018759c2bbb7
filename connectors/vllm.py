"""`KvtideConnector`: any kvtide store behind vLLM's v1 KV connector interface, with hybrid groups kept on.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvtideConnector",
        "kv_connector_module_path": "kvtide.connectors.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {
            "store": {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": "/var/kv"}}}}'

vLLM makes one for its scheduler and one in each worker, which owns the store: `vllm_bridge` has the two halves. This
file is the seam: it translates vLLM's calls, and says what a value is (`ValueSpace`). Written for vLLM 0.32 and 0.33;
this module and `vllm_bridge.metrics`, alone in kvtide, import vLLM.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from math import gcd
from typing import Any

from vllm.config import get_layers_from_vllm_config  # type: ignore[import-not-found]
from vllm.distributed.kv_transfer.kv_connector.v1 import (  # type: ignore[import-not-found]
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger  # type: ignore[import-not-found]
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # type: ignore[import-not-found]
from vllm.model_executor.models.utils import extract_layer_index  # type: ignore[import-not-found]

from kvtide.kvcache import ConfigError
from kvtide.offload.keys import HeadPart, ValueSpace

from .config import open_store
from .per_rank import is_private
from .vllm_bridge.groups import Group, layer_spec, read_groups
from .vllm_bridge.messages import FromWorker, ToWorker
from .vllm_bridge.metrics import KvtideMetrics, KvtideStats
from .vllm_bridge.pages import Pages
from .vllm_bridge.scheduler import SchedulerSide
from .vllm_bridge.settings import VllmSettings, read_settings, store_config
from .vllm_bridge.weights import weights_name
from .vllm_bridge.worker import Part, Results, WorkerSide

logger = init_logger(f"vllm.{__name__}")

_HASHES = ("sha256", "sha256_cbor")


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's work, as vLLM carries it."""

    work: ToWorker


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers' news, as vLLM carries and adds it up."""

    news: FromWorker

    def aggregate(self, other: WorkerMetadata) -> WorkerMetadata:
        return WorkerMetadata(self.news.merge(other.news))


class KvtideConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module. `counts` (scheduler side) has everything since the start, of all workers."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = read_settings(self._kv_transfer_config.kv_connector_extra_config or {})
        self._groups = read_groups(kv_cache_config)
        _check(vllm_config)
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        self.counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._results: Results | None = None
        # vLLM can recompute from the first failed block only where all blocks before it still hold their tokens.
        self._by_block = len(kv_cache_config.kv_cache_groups) == 1 and self._groups[0].is_full
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = self._make_scheduler()
        else:
            self.worker = self._make_worker()

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a save that is lost is a miss later

    # Scheduler side

    def on_new_request(self, request: Any) -> None:
        self._scheduler.added(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        matched = self._scheduler.matched(request, num_computed_tokens)
        return matched, bool(matched)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        assert self._kv_cache_manager is not None
        tables = self._kv_cache_manager.get_block_ids
        offered = getattr(scheduler_output, "kv_connector_block_state", None)
        states = {} if offered is None else offered.boundary_state_offloads
        return StepMetadata(self._scheduler.step(scheduler_output.num_scheduled_tokens, tables, states))

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, WorkerMetadata):
            self._scheduler.heard(metadata.news)
            self.counts = self._scheduler.counts

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        sound = request.status.name != "FINISHED_ERROR"
        return self._scheduler.finished(request, block_ids, sound=sound), None

    def reset_cache(self) -> bool:
        self._scheduler.forget()
        return True

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        parts = [self._part(group, kv_caches) for group in self._groups]
        self._worker.register(parts)
        logger.info(
            "KvtideConnector: %d groups (%s), %s bytes a block, store %s",
            len(parts),
            ", ".join(_describe(part.group) for part in parts),
            " + ".join(str(part.pages.value_bytes) for part in parts),
            self._worker.store.name,
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start(self._work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before a request runs."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks of all layers are saved at the end of the step."""

    def wait_for_save(self) -> None:
        self._worker.save(self._work)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self._results = self._worker.poll(idle=self._work.idle)
        return results.sent or None, results.received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self.get_finished(finished_req_ids)
        assert self._results is not None
        sent, received, failed, _ = self._results
        return KVConnectorTransferResults(sent, received, set() if self._by_block else failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._results.failed_blocks if self._by_block and self._results is not None else set()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        news = self._worker.news()
        return WorkerMetadata(news) if news else None

    # Both

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()

    def get_kv_connector_stats(self) -> KvtideStats | None:
        if self.scheduler is None:
            return None
        new = self.counts - self._reported
        self._reported = Counter(self.counts)
        return KvtideStats(dict(new)) if new else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvtideStats:
        return KvtideStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvtideMetrics:
        return KvtideMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler is not None
        return self.scheduler

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker is not None
        return self.worker

    @property
    def _work(self) -> ToWorker:
        metadata = self._connector_metadata
        assert isinstance(metadata, StepMetadata)
        return metadata.work

    def _make_scheduler(self) -> SchedulerSide:
        role = self._kv_transfer_config.kv_role
        sizes = [group.block_size for group in self._groups]
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.warning(
                "KvtideConnector: kv_load_failure_policy is 'fail': a value that turns out damaged fails its request; "
                "with 'recompute' it costs time only"
            )
        return SchedulerSide(
            self._groups,
            hash_block=self._kv_cache_config.hash_block_size or gcd(*sizes),
            num_workers=self._vllm_config.parallel_config.world_size,
            loads=role != "kv_producer",
            stores=role != "kv_consumer",
            window_interval=self._settings.window_interval,
            look_up_timeout_s=self._settings.look_up_timeout_s,
        )

    def _make_worker(self) -> WorkerSide:
        settings: VllmSettings = self._settings
        parallel = self._vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        return WorkerSide(
            open_store(store_config(settings, rank=rank)),
            staging_bytes=settings.staging_size,
            threads=settings.io_threads,
            look_up_timeout_s=settings.look_up_timeout_s,
            transfer_timeout_s=settings.transfer_timeout_s,
        )

    def _part(self, group: Group, kv_caches: dict[str, Any]) -> Part:
        vllm_group = self._kv_cache_config.kv_cache_groups[group.index]
        names = [name for name in vllm_group.layer_names if name in kv_caches]
        spec = layer_spec(vllm_group.kv_cache_spec)
        parallel = self._vllm_config.parallel_config
        tp_size = parallel.tensor_parallel_size
        replicas = max(1, tp_size // (getattr(spec, "max_tp_shards", None) or tp_size))
        tp_rank = parallel.rank % tp_size
        space = ValueSpace(
            model=weights_name(self._vllm_config, self._settings.weights),
            revision="",  # it is part of the name, where the name does not say it all
            layer_spec=f"{vllm_group.kv_cache_spec!r} {self._attention(names)} {names}",
            layers=tuple(extract_layer_index(name) for name in names),
            heads=HeadPart(tp_rank // replicas, -(-tp_size // replicas)),
            block_tokens=group.block_size,
            hash_key=self._vllm_config.cache_config.prefix_caching_hash_algo.encode(),
        )
        # A layer that holds states has a tensor for each kind of them.
        caches = [cache for name in names for cache in _tensors(kv_caches[name])]
        pages = Pages(caches, self._kv_cache_config.num_blocks)
        return Part(group, space.digest(), pages, tp_rank % replicas == 0 or is_private(self._settings.store))

    def _attention(self, names: list[str]) -> str:
        """What decides the order of bytes inside a block: backends differ, and on CPUs its instruction sets do."""
        layers = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase, names)
        kinds = {(layer.get_attn_backend().get_name(), getattr(layer, "isa", "")) for layer in layers.values()}
        return json.dumps(sorted(kinds))


def _check(vllm_config: Any) -> None:
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in _HASHES:
        raise ConfigError(
            f"prefix_caching_hash_algo {algorithm!r} does not name blocks alike in all processes, or not safely; "
            f"KvtideConnector allows {', '.join(_HASHES)}"
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConfigError(f"{name} {size} is not supported by KvtideConnector; allowed is 1")


def _tensors(caches: Any) -> list[Any]:
    return list(caches) if isinstance(caches, list | tuple) else [caches]


def _describe(group: Group) -> str:
    if group.is_state:
        return "state"
    if group.window is not None:
        return f"window {group.window}"
    return "full" if group.chunk is None else f"chunks of {group.chunk}"
