"""From a deployment to an engine: device memory minus weights is the pool, vLLM's defaults fill what was not given.

A deployment is frozen and says everything that a run depends on besides the trace, so a report can repeat it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from kvtide.hma import HybridMemoryManager
from kvtide.kvcache import MLA, ConfigError, ModelLayout
from kvtide.kvcache.geometry import PageGeometry
from kvtide.kvcache.policies import plan_geometry

from ..capacity import in_flight_pages, request_pages
from .cost import CostModel, Efficiency, Parallel
from .defaults import resolve_limits
from .drafter import drafter_of
from .engine import Engine
from .gpus import GIB, GpuSpec
from .kernel_curves import KernelCurves
from .measured import MeasuredAcceptance
from .offloading import Offload, OffloadedRows
from .recording import Recording
from .scheduler import Scheduler
from .settings import DEFAULT_VERSION, EngineSettings, rules_of
from .speculation import Acceptance, SpeculativeConfig
from .work import ModelWork

# What CUDA's context, activations at the largest step and captured graphs take beside weights and cache.
RESERVED_BYTES = 3 * GIB
GPU_MEMORY_UTILIZATION = 0.92


def stage_layers(layers: int, stages: int) -> list[int]:
    """Layers of each pipeline stage, as vLLM cuts them: what is over goes to the stages before the last."""
    counts = [layers // stages] * stages
    for number in range(layers % stages):
        counts[-2 - number] += 1
    return counts


@dataclass(frozen=True)
class Deployment:
    """A model on devices under an engine's flags, which are named as in vLLM.

    `layout` is of the whole model, `work` its costs. `kv_cache_memory_bytes` overrides what utilisation leaves.
    `policy` is the memory policy: kvtide's, or a published baseline. `acceptance` is needed with `speculative`,
    unless drafts are looked up and `measure_drafts` says that the trace's token ids judge them.
    """

    layout: ModelLayout
    work: ModelWork
    gpu: GpuSpec
    parallel: Parallel = field(default_factory=Parallel)
    policy: str = "kvtide"
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    kv_cache_memory_bytes: int | None = None
    performance_mode: str = "balanced"
    usage_context: str = "api-server"
    version: str = DEFAULT_VERSION
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    async_scheduling: bool = True
    watermark: float = 0.0
    speculative: SpeculativeConfig | None = None
    acceptance: Acceptance | None = None
    measure_drafts: bool = False
    thinking_token_budget: int | None = None
    efficiency: Efficiency = field(default_factory=Efficiency)
    offload: Offload | None = None
    kernel_curves: KernelCurves | None = None

    def cost(self) -> CostModel:
        """The cost model of one engine."""
        tensor = self.parallel.tensor
        layout, drafter = self.layout, None
        if self.speculative:
            layout, drafter = drafter_of(self.speculative, layout, self.work, tensor)
        return CostModel(
            layout.shard(tensor), self.work, self.gpu, self.parallel, self.efficiency, drafter, self.kernel_curves
        )

    def geometry(self) -> PageGeometry:
        """The page geometry of one rank."""
        layout = self._stage_layout().shard(self.parallel.tensor)
        # A single group has one table in any case; the manager only refuses tables that groups share.
        return replace(plan_geometry(self.policy, layout, self.block_size), one_table=False)

    def _stored_layout(self) -> ModelLayout:
        """The layout of all ranks, with the drafter's layers."""
        if self.speculative is None:
            return self.layout
        return drafter_of(self.speculative, self.layout, self.work, self.parallel.tensor)[0]

    def _stage_layout(self) -> ModelLayout:
        """The layers of the pipeline stage that stores most a token, of all ranks."""
        layout, stages = self._stored_layout(), self.parallel.pipeline
        if stages == 1:
            return layout
        own = [layer for layer in layout.layers if not layer.draft]
        if stages > len(own):
            raise ConfigError(f"{layout.name} has {len(own)} layers, which cannot be {stages} pipeline stages")
        ends = [own[end - 1].index + 1 for end in np.cumsum(stage_layers(len(own), stages)).tolist()]
        ends[-1] = layout.layers[-1].index + 1
        parts = [layout.stage(first, last) for first, last in pairwise([own[0].index, *ends])]
        return max(parts, key=lambda part: (part.bytes_per_token, part.state_bytes))

    def settings(self) -> EngineSettings:
        """The flags with defaults filled in; `ConfigError` for what vLLM refuses."""
        rules = rules_of(self.version)
        longest = self.max_model_len or self.layout.max_model_len
        if longest is None:
            raise ConfigError(f"{self.layout.name} names no longest sequence; give --max-model-len")
        limits = resolve_limits(
            self.gpu,
            max_model_len=longest,
            version=self.version,
            context=self.usage_context,
            performance_mode=self.performance_mode,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            enable_chunked_prefill=self.enable_chunked_prefill,
        )
        drafter = self.speculative
        return EngineSettings(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=longest,
            block_size=self.block_size,
            enable_chunked_prefill=self.enable_chunked_prefill,
            enable_prefix_caching=self.enable_prefix_caching,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            scheduling_policy=self.scheduling_policy,
            async_scheduling=self.async_scheduling
            and (drafter is None or drafter.allows_async_scheduling)
            and (self.parallel.pipeline == 1 or rules.async_pipeline),
            watermark=self.watermark,
            num_speculative_tokens=drafter.num_speculative_tokens if drafter else 0,
            lookahead_tokens=drafter.lookahead_tokens if drafter else 0,
            draft_slots=drafter.draft_slots if drafter else 0,
            draft_schedule=drafter.dense_schedule(limits.max_num_seqs) if drafter else (),
            pipeline_parallel_size=self.parallel.pipeline,
            rules=rules,
        )

    @property
    def ignores_budget(self) -> bool:
        """Whether this version accepts a thinking budget and does nothing with it."""
        drafts = self.speculative is not None and self.thinking_token_budget is not None
        return drafts and not rules_of(self.version).budget_with_drafts

    def notes(self) -> list[str]:
        """What whoever reads the results should know of the settings."""
        notes = list(self.speculative.notes) if self.speculative else []
        is_sparse = any(isinstance(group.spec, MLA) and group.spec.index_head_dim for group in self.layout.groups)
        if is_sparse and self.speculative and self.speculative.method == "mtp":
            notes.append(
                "vLLM runs sparse MLA models with MTP eagerly; the launches that CUDA graphs save come on top of "
                "overhead_s here"
            )
        stages, limit = self.parallel.pipeline, self.settings().max_num_seqs
        if self.ignores_budget:
            notes.append(f"vLLM {self.version} ignores thinking budgets where speculation is on; so does this run")
        if stages > 1:
            notes.append(
                f"max_num_seqs {limit} bounds the requests of all {stages} steps in the pipeline together, not those "
                f"of one: steps decode about {max(limit // stages, 1)} requests; raise it {stages}-fold to fill them"
            )
        return notes

    def pool_bytes(self) -> int:
        """Bytes for the KV cache on one rank; `ConfigError` when the weights leave none."""
        if self.kv_cache_memory_bytes is not None:
            return self.kv_cache_memory_bytes
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, but must be above 0, at most 1"
            )
        weights = self.cost().weight_bytes
        pool = int(self.gpu.memory * self.gpu_memory_utilization - weights - RESERVED_BYTES)
        if pool <= 0:
            raise ConfigError(
                f"{self.layout.name} needs {weights / GIB:.1f} GiB of weights a rank, which leaves no memory for its "
                f"KV cache on {self.gpu.name} ({self.gpu.memory / GIB:.0f} GiB); use more ranks (--tp)"
            )
        return pool

    def engine(self, seed: int = 0, recording: Recording | None = None) -> Engine:
        """An engine ready to run; `ConfigError` when its pool cannot hold one request of `max_model_len`."""
        settings, geometry, pool = self.settings(), self.geometry(), self.pool_bytes()
        acceptance: Acceptance | MeasuredAcceptance = self.acceptance or Acceptance([])
        if self.speculative and self.measure_drafts:
            acceptance = MeasuredAcceptance(self.speculative, settings.max_model_len)
        elif self.speculative and self.acceptance is None:
            raise ConfigError(
                "speculation needs to know how many drafts come true: give --acceptance-rate, --acceptance-rates or "
                "--acceptance-length, or for ngram and suffix a trace with token ids"
            )
        longest = settings.max_model_len + settings.lookahead_tokens
        pages = sum(request_pages(geometry, longest))
        pages += sum(in_flight_pages(geometry, settings.max_num_batched_tokens, longest))
        if pages * geometry.page_bytes > pool:
            raise ConfigError(
                f"one request of max_model_len {settings.max_model_len} needs {pages * geometry.page_bytes / GIB:.2f} "
                f"GiB of KV cache; the pool has {pool / GIB:.2f} GiB: lower max_model_len or raise the memory"
            )
        tiers = self._offloaded if self.offload else None
        schedulers = [Scheduler(geometry, pool, settings, tiers) for _ in range(self.parallel.data)]
        return Engine(
            schedulers,
            self.cost(),
            acceptance,
            seed=seed,
            thinking_budget=None if self.ignores_budget else self.thinking_token_budget,
            recording=recording,
        )

    def _offloaded(self, manager: HybridMemoryManager) -> OffloadedRows:
        """The tiers under one rank's manager; loading is weighed against a prefill of one full step."""
        assert self.offload is not None
        if not manager.prefix_caching:
            raise ConfigError("offload tiers need prefix caching: keys say what is stored")
        return OffloadedRows(
            manager,
            self.offload,
            full_layout=self._stage_layout(),
            tensor=self.parallel.tensor,
            ranks=self.parallel.data,
            seconds_per_token=self.cost().prefill_seconds_per_token(self.settings().max_num_batched_tokens),
        )
