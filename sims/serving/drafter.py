"""What a drafter costs: its KV layers in the layout, its weights, and its passes in every step.

MTP modules and EAGLE heads are one layer shaped like the target's, with the target's output head. A draft model is a
model of its own, read from the config that `model` names. N-gram and suffix drafts are looked up on the host and are
taken for free. A drafter runs once per draft token, or once in all when it drafts in parallel; the first pass sees
every token of the step, later ones one token per request.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtide.kvcache import ConfigError, ModelLayout
from kvtide.kvcache.documents import read_json

from .speculation import SpeculativeConfig
from .work import ModelWork, read_work

_ONE_LAYER = ("mtp", "eagle", "eagle3", "dspark")


@dataclass(frozen=True)
class DrafterWork:
    """One drafter: what a pass multiplies with, passes per step, and ranks that share its weights."""

    work: ModelWork
    passes: int
    tensor: int

    @property
    def weight_bytes(self) -> float:
        """Bytes of its weights on one rank; the target's output head is shared, not stored again."""
        work = self.work
        own = work.dense_params + work.routed_params + work.embedding_params
        return work.weight_bytes * own / self.tensor


def drafter_of(
    config: SpeculativeConfig, layout: ModelLayout, work: ModelWork, tensor: int
) -> tuple[ModelLayout, DrafterWork | None]:
    """The layout with the drafter's KV layers, and its costs; None for drafts that are looked up.

    `ConfigError` when the model has no such layers, or the draft model's config cannot be read.
    """
    passes = 1 if config.parallel_drafting or config.method in ("dflash", "dspark") else config.num_speculative_tokens
    ranks = config.draft_tensor_parallel_size or tensor
    if config.method in _ONE_LAYER:
        has_own_layers = config.method == "mtp"
        widened = layout.with_draft() if has_own_layers else layout.with_draft([layout.eagle_spec()])
        return widened, DrafterWork(_one_layer(work, routed=has_own_layers), passes, ranks)
    if config.method in ("ngram", "suffix"):
        return layout, None
    path = Path(config.model or "")
    if not path.exists():
        raise ConfigError(
            f"speculative config: model {config.model!r} is no folder or config.json here; its size and KV layers are "
            "read from it"
        )
    draft = ModelLayout.from_hf(path)
    specs = [layer.spec for layer in draft.layers if layer.spec is not None]
    return layout.with_draft(specs), DrafterWork(read_work(read_json(path, "config.json").data), passes, ranks)


def _one_layer(work: ModelWork, *, routed: bool) -> ModelWork:
    """One layer of the target behind a projection of two hidden states; MTP modules keep the target's experts."""
    projection = 2 * work.hidden * work.hidden
    experts = routed and work.expert_layers > 0
    dense = work.dense_params // work.layers
    return ModelWork(
        layers=1,
        hidden=work.hidden,
        dense_params=dense + projection,
        head_params=work.head_params,
        embedding_params=0,
        query_size=work.query_size,
        expert_layers=1 if experts else 0,
        experts=work.experts if experts else 0,
        experts_per_token=work.experts_per_token if experts else 0,
        expert_params=work.expert_params if experts else 0,
        weight_bytes=work.weight_bytes,
    )
