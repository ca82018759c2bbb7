"""`PagedModel`: one step of a transformers model over a manager's tables, for engines that schedule for themselves.

    plan = manager.reserve(rows, counts)          which rows compute how many tokens
    logits = model.run(plan, token_ids)           the forward pass: keys and values go to the plan's slots
    manager.commit(rows, accepted, ...)           what of it stands

Rows of any lengths, prefill chunks and decode steps alike, go through the model as one packed sequence without padding.
Models with recurrent states cannot pack: there, rows with equally many tokens make a batch.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtide.hma import Copy, HybridMemoryManager, Reservation
from kvtide.kernels import copy_blocks
from kvtide.kvcache import ConfigError, ModelLayout
from kvtide.kvcache.arena import Arena
from kvtide.kvcache.specs import Int64Array

from .attention import ATTENTION_NAME, Step, StepCache, places_of

# Elements of each weight that its digest looks at, spread evenly over it.
_SAMPLES = 16


def model_layout(model: Any) -> ModelLayout:
    """The KV layout of a loaded model: from its config, in the dtype that its weights have now."""
    config = model.config.get_text_config(decoder=True)
    dtype = str(model.dtype).removeprefix("torch.")
    # A quantisation config speaks of weights here; the cache holds what the model computes.
    data = {**config.to_dict(), "dtype": dtype}
    data.pop("quantization_config", None)
    return ModelLayout.from_hf(data).with_dtype(dtype)


def weights_digest(model: Any) -> str:
    """What names a model's weights and config, so that no two models share stored values.

    Sampled from the weights themselves, a few elements of each: a name or a path would not tell checkpoints apart.
    """
    config = model.config.to_dict()
    for key in ("_name_or_path", "transformers_version", "dtype"):
        config.pop(key, None)
    digest = blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16)
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().reshape(-1)
        at = torch.linspace(0, max(flat.numel() - 1, 0), min(_SAMPLES, flat.numel())).long()
        digest.update(flat[at.to(flat.device)].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class PagedModel:
    """A transformers model that reads and writes its KV in `arena` through `manager`'s tables.

    Sets the model's attention implementation to kvtide's; `close` gives it its own back. `forward` is called in place
    of the model. `has_states`: some layers are recurrent. `ConfigError` for models whose layers or attention this
    bridge does not serve.
    """

    def __init__(
        self, model: Any, manager: HybridMemoryManager, arena: Arena, *, forward: Callable[..., Any] | None = None
    ) -> None:
        self.model = model
        self.manager = manager
        self.arena = arena
        self.device: torch.device = model.device
        self._forward = forward or model
        self._cache = StepCache(places_of(manager, arena))
        self._cache_name = cache_argument(model)
        self.has_states = any(group.is_state for group in manager.groups)
        self._own_attention = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION_NAME)
        if model.config.get_text_config(decoder=True)._attn_implementation != ATTENTION_NAME:
            raise ConfigError(
                f"{type(model).__name__} does not take its attention from the library's attention interface; kvtide "
                "cannot run under it"
            )

    @torch.no_grad()
    def run(self, plan: Reservation, token_ids: npt.ArrayLike, logits_at: npt.ArrayLike | None = None) -> torch.Tensor:
        """One forward pass over a reservation's tokens.

        `token_ids` [tokens]: the step's tokens, row after row. `logits_at`: places among them, ascending, whose logits
        are wanted; the last token of each row if None. Returns logits `[len(logits_at), vocabulary]`.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        ends = np.cumsum(plan.num_tokens)
        if ids.shape != (int(ends[-1]),):
            raise ConfigError(f"token_ids has the shape {list(ids.shape)}; the reservation has {int(ends[-1])} tokens")
        wanted = ends - 1 if logits_at is None else np.asarray(logits_at, dtype=np.int64)
        positions = np.concatenate([np.arange(n) for n in plan.num_tokens]) + np.repeat(plan.start, plan.num_tokens)
        self.copy(plan.copies)
        logits: torch.Tensor | None = None
        for rows, shape in self._batches(plan):
            tokens = np.concatenate([np.arange(ends[row] - plan.num_tokens[row], ends[row]) for row in rows])
            part = plan._replace(rows=plan.rows[rows], start=plan.start[rows], num_tokens=plan.num_tokens[rows])
            mine = np.flatnonzero(np.isin(wanted, tokens))
            at = np.searchsorted(tokens, wanted[mine])
            found = self._pass(part, ids[tokens].reshape(shape), positions[tokens].reshape(shape), at)
            if logits is None:
                logits = found.new_empty((len(wanted), found.shape[-1]))
            logits[torch.from_numpy(mine).to(found.device)] = found
        assert logits is not None
        return logits

    def copy(self, copies: list[Copy]) -> None:
        """Make the copies that a reservation or a checkpoint asks for, whole blocks within the arena."""
        unit = self.manager.geometry.unit
        for group, source, destination in copies:
            num_bytes = self.manager.group(group).fmt.block_bytes
            starts, ends = (entries.astype(np.int64) * unit for entries in (source, destination))
            copy_blocks(self.arena.memory, self.arena.memory, starts, ends, num_bytes)

    def close(self) -> None:
        """Give the model its own attention back."""
        self.model.set_attn_implementation(self._own_attention)

    def _batches(self, plan: Reservation) -> Iterator[tuple[Int64Array, tuple[int, int]]]:
        """Places of the plan's rows that go through the model together, and the shape `[b, n]` of their batch."""
        if not self.has_states:
            yield np.arange(len(plan.rows)), (1, -1)
            return
        for count in np.unique(plan.num_tokens).tolist():
            rows = np.flatnonzero(plan.num_tokens == count)
            yield rows, (len(rows), count)

    def _pass(self, plan: Reservation, ids: Int64Array, positions: Int64Array, logits_at: Int64Array) -> torch.Tensor:
        """The logits `[len(logits_at), vocabulary]` at places of the flattened batch."""
        count = ids.shape[1]
        rows, columns = np.divmod(logits_at, count)
        # All rows of a batch give logits of the same columns; what nobody asked for is dropped.
        kept = np.unique(columns)
        self._cache.step = Step.of(self.manager, plan, self.device)
        try:
            output = self._forward(
                input_ids=torch.from_numpy(ids).to(self.device),
                position_ids=torch.from_numpy(positions).to(self.device),
                use_cache=True,
                logits_to_keep=torch.from_numpy(kept).to(self.device),
                return_dict=True,
                **{self._cache_name: self._cache},
            )
        finally:
            self._cache.end()
        logits: torch.Tensor = output.logits
        return logits[torch.from_numpy(rows), torch.from_numpy(np.searchsorted(kept, columns))]


def cache_argument(model: Any) -> str:
    """What the model's forward calls its cache: `cache`, or `past_key_values` before transformers 5.24."""
    names = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise ConfigError(f"{type(model).__name__}'s forward takes no cache; kvtide serves decoder models that do")
