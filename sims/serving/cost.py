"""How long a step takes: a roofline over weights, KV cache and FLOPs, plus collectives and launches.

    step = overhead + per_request * requests
         + max(weight bytes / bandwidth, GEMM FLOPs / peak)            every rank reads its share of the weights once
         + sum over requests of max(KV bytes / bandwidth, attention FLOPs / peak)
         + collectives                                                 ring all-reduce, twice a layer, under TP
         + drafter's passes                                            each reads the drafter's weights once

Rates are the data sheet's times an efficiency; efficiencies and overheads are the model's only free numbers, and
`calibrate.py` fits them to a recorded run. The decode attention of MLA models can be measured instead
(`kernel_curves.py`). Windows are respected: a layer reads the KV that its query can reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import MLA, ConfigError, ModelLayout

from .drafter import DrafterWork
from .gpus import GpuSpec
from .job import Job, Scheduled, Step
from .kernel_curves import MOST_QUERY_TOKENS, Curve, KernelCurves
from .work import ModelWork

ACTIVATION_BYTES = 2
# Latency of one small collective among GPUs of a node, whatever its size.
COLLECTIVE_S = 1e-5
# Launches and sampling of one pass of a drafter; a step's own overhead is many layers' worth.
DRAFT_PASS_S = 2e-4


@dataclass(frozen=True)
class Efficiency:
    """The free numbers of the cost model: shares of the data sheet's rates, and seconds.

    The defaults are round figures of well-tuned engines: 60 % of peak FLOP/s in large GEMMs, 80 % of the bandwidth,
    half of the link, two milliseconds of launches and bookkeeping per step.
    """

    compute: float = 0.6
    memory: float = 0.8
    link: float = 0.5
    overhead_s: float = 2e-3
    per_request_s: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("compute", "memory", "link"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"efficiency {name} is {getattr(self, name)}, but must be above 0 and at most 1")
        for name in ("overhead_s", "per_request_s"):
            if not 0 <= getattr(self, name) < 10:
                raise ConfigError(f"efficiency {name} is {getattr(self, name)}, but must be from 0 to 10 seconds")


@dataclass(frozen=True)
class Parallel:
    """How one engine is spread: tensor-parallel ranks, data-parallel ranks whose experts are shared out, and stages."""

    tensor: int = 1
    data: int = 1
    pipeline: int = 1

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.tensor * self.data * self.pipeline


class CostModel:
    """Seconds per step of one model on one kind of GPU. `layout` is of one rank, `work` of the whole model."""

    def __init__(
        self,
        layout: ModelLayout,
        work: ModelWork,
        gpu: GpuSpec,
        parallel: Parallel = Parallel(),
        efficiency: Efficiency = Efficiency(),
        drafter: DrafterWork | None = None,
        curves: KernelCurves | None = None,
    ) -> None:
        self.work, self.gpu, self.parallel, self.efficiency = work, gpu, parallel, efficiency
        self.drafter = drafter
        self._curves = curves
        self._measured = self._mla_curve(layout)
        self._layout = layout
        self._groups = [(group.spec, group.bytes_per_token, len(group.layers)) for group in layout.groups]
        self._state_bytes = layout.state_bytes
        # 8-bit weights run at the 8-bit rate where the device has one.
        peak = gpu.flops8 if work.weight_bytes <= 1 and gpu.flops8 else gpu.flops16
        self._flops = peak * efficiency.compute
        self._attention_flops = gpu.flops16 * efficiency.compute
        self._bandwidth = gpu.bandwidth * efficiency.memory
        self._link = gpu.link * efficiency.link

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights on one rank."""
        work = self.work
        experts = work.weight_bytes * work.routed_params
        drafter = self.drafter.weight_bytes if self.drafter else 0.0
        per_stage = (work.bytes_total - experts + experts / self.parallel.data) / self.parallel.pipeline
        return per_stage / self.parallel.tensor + drafter

    def seconds(self, steps: Sequence[Step | None]) -> float:
        """One step of all data-parallel ranks in lockstep; None is a rank with nothing to do."""
        ranks = [self._rank(step) for step in steps if step is not None]
        tokens = sum(step.num_tokens for step in steps if step is not None)
        return max(ranks) + self._experts(tokens, len(steps)) + self._collectives(steps, tokens)

    def stage_seconds(self, steps: Sequence[Step | None]) -> float:
        """The same step in the slowest of the pipeline's stages, handing its hidden states on included."""
        stages, work = self.parallel.pipeline, self.work
        if stages == 1:
            return self.seconds(steps)
        share = -(-work.layers // stages) / work.layers
        most = max(step.num_tokens for step in steps if step is not None)
        handing_on = COLLECTIVE_S + most * work.hidden * ACTIVATION_BYTES / self._link
        return self.seconds(steps) * share + handing_on

    def with_drafter(self, drafter: DrafterWork | None) -> CostModel:
        """The same model with another drafter, or none."""
        if drafter == self.drafter:
            return self
        return CostModel(self._layout, self.work, self.gpu, self.parallel, self.efficiency, drafter, self._curves)

    def break_even(self, steps: Sequence[Step | None]) -> float:
        """Tokens per request that a step with drafts must bring to be worth its time, compared with one without."""
        return self.seconds(steps) / self.with_drafter(None).seconds(
            [None if step is None else _without_drafts(step) for step in steps]
        )

    def prefill_seconds_per_token(self, num_tokens: int) -> float:
        """Seconds a token of a prompt's first `num_tokens`, computed in one step alone."""
        nothing = np.zeros(1, dtype=np.int64)
        part = Scheduled(Job("", nothing, nothing), 0, 0, num_tokens, 0, samples=True)
        return self.seconds([Step((part,), ())]) / num_tokens

    def _rank(self, step: Step) -> float:
        """What one rank does by itself: overheads, dense layers, head, attention."""
        work, tensor = self.work, self.parallel.tensor
        dense = 2.0 * (work.dense_params * step.num_tokens + work.head_params * step.num_samples) / tensor
        weights = (work.weight_bytes * work.dense_params + 2.0 * work.head_params) / tensor
        return (
            self.efficiency.overhead_s
            + self.efficiency.per_request_s * step.num_requests
            + max(weights / self._bandwidth, dense / self._flops)
            + self._attention(step)
            + self._drafting(step)
        )

    def _drafting(self, step: Step) -> float:
        """The drafter's passes, when the step samples anything to draft after."""
        if self.drafter is None:
            return 0.0
        samples = sum(part.samples for part in step.parts)
        if not samples:
            return 0.0
        work, tensor = self.drafter.work, self.drafter.tensor
        seconds = 0.0
        for tokens in [step.num_tokens] + [samples] * (self.drafter.passes - 1):
            read = work.dense_params + work.routed_params * work.experts_touched(tokens)
            weights = (work.weight_bytes * read + 2.0 * work.head_params) / tensor
            flops = 2.0 * (work.active_params * tokens + work.head_params * samples) / tensor
            seconds += DRAFT_PASS_S + max(weights / self._bandwidth, flops / self._flops)
        return seconds

    def _attention(self, step: Step) -> float:
        _, start, tokens = step.columns
        end = start + tokens
        middle = (start + end + 1) / 2
        # Writing and reading the cache, and scores and values over what each token can reach: on average the context
        # at the middle of the chunk, cut by the window.
        reads: npt.NDArray[np.float64] = np.zeros(len(start))
        pairs: npt.NDArray[np.float64] = np.zeros(len(start))
        measured: npt.NDArray[np.float64] | None = None
        for spec, token_bytes, layers in self._groups:
            if not token_bytes:
                continue
            reach = end if spec.reach is None else np.minimum(end, spec.reach + tokens)
            seen = middle if spec.reach is None else np.minimum(middle, spec.reach)
            read, paired = reach * token_bytes, layers * tokens * seen
            if self._measured is not None and type(spec) is MLA:
                decodes = tokens <= MOST_QUERY_TOKENS
                rows = np.maximum(tokens * self.work.heads // self.parallel.tensor, 1)
                curve = np.where(decodes, layers * self._measured.seconds(rows, end), 0.0)
                measured = curve if measured is None else measured + curve
                read, paired = ~decodes * read, ~decodes * paired
            reads += read
            pairs += paired
        flops = 4.0 * pairs * self.work.query_size / self.parallel.tensor
        states = 2.0 * self._state_bytes
        per_request = np.maximum((reads + states) / self._bandwidth, flops / self._attention_flops)
        return float((per_request if measured is None else measured + per_request).sum())

    def _mla_curve(self, layout: ModelLayout) -> Curve | None:
        """The measured kernel for the layout's latents; `ConfigError` when there are none, or heads are not known."""
        if self._curves is None:
            return None
        latents = [group.spec for group in layout.groups if type(group.spec) is MLA]
        if not latents or not self.work.heads:
            raise ConfigError(f"kernel curves are of MLA decode; {layout.name} has no MLA layers of known head count")
        return self._curves.curve(latents[0].dtype, self.gpu.name)

    def _experts(self, tokens: int, ranks: int) -> float:
        """Routed experts, spread over all ranks: their weights are read once for the tokens of all."""
        work = self.work
        if not work.experts:
            return 0.0
        shares = self.parallel.tensor * ranks
        weights = work.weight_bytes * work.routed_params * work.experts_touched(tokens) / shares
        flops = 2.0 * work.expert_layers * work.experts_per_token * work.expert_params * tokens / shares
        return max(weights / self._bandwidth, flops / self._flops)

    def _collectives(self, steps: Sequence[Step | None], tokens: int) -> float:
        """All-reduce after attention and MLP under TP; gather and scatter around the experts under DP."""
        work, tensor, data = self.work, self.parallel.tensor, self.parallel.data
        per_token = work.hidden * ACTIVATION_BYTES
        seconds = 0.0
        if tensor > 1:
            most = max(step.num_tokens for step in steps if step is not None)
            seconds += work.layers * 2 * (COLLECTIVE_S + 2 * (tensor - 1) / tensor * most * per_token / self._link)
        if data > 1:
            seconds += work.expert_layers * 2 * (COLLECTIVE_S + (data - 1) / data * tokens * per_token / self._link)
        return seconds


def _without_drafts(step: Step) -> Step:
    parts = (part._replace(num_tokens=part.num_tokens - part.num_drafts, num_drafts=0) for part in step.parts)
    return Step(tuple(parts), step.preempted)
