"""The two places where a transformers model meets the arena: its cache's updates and its attention function.

    model's attention layer     cache.update(k, v, layer)  ──►  new tokens into their slots
                                attention(q, ...)          ──►  paged_attention, mla_decode, mla_prefill over the tables

Both are interfaces of the library (`Cache`, `ALL_ATTENTION_FUNCTIONS`), so no model is changed. `update` hands its
layer over to the attention call that follows it: what the model passes on as keys and values is not read again.

MLA models give `update` the latent and the rotary key, before they decompress them. They are stored as they are, and
attention runs absorbed, with the two halves of the module's own `kv_b_proj`. So that the module's decompression, which
comes in between, costs next to nothing, `update` returns one token of the step.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import AttentionInterface, Cache

from kvtide.hma import HybridMemoryManager, Reservation
from kvtide.kernels import (
    UpProjections,
    mla_decode,
    mla_prefill,
    paged_attention,
    table_lengths,
    write_kv,
    write_latent,
)
from kvtide.kernels.mla import MAX_QUERY_TOKENS
from kvtide.kvcache import (
    MLA,
    ConfigError,
    FullAttention,
    KvtideError,
    LayerSpec,
    RecurrentState,
    SlidingWindow,
    SlidingWindowMLA,
)
from kvtide.kvcache.arena import Arena

ATTENTION_NAME = "kvtide"
SERVED = (FullAttention, SlidingWindow, MLA, SlidingWindowMLA, RecurrentState)


class Place(NamedTuple):
    """Where a layer's bytes are: its group, the group's table that holds it, and its components' views of the arena."""

    layer: int
    spec: LayerSpec
    group: str
    table: int
    views: dict[str, torch.Tensor]


class GroupStep(NamedTuple):
    """A group's part of a step, on the model's device; lengths count from the table's first column on.

    `slots` int64 [tables, tokens], `table` int32 [tables, rows, columns], `lengths` int32 [rows] with the step's
    tokens; `context` (host) int32 [rows] without them. Of a recurrent state `table` alone, with one column.
    """

    table: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    context: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Step:
    """One forward pass: `counts[i]` new tokens of row i, row after row, in a batch of any shape `[b, n]`.

    `starts_anew` bool [rows]: nothing of the row was computed before. `owners` and `places` [tokens]: row and place of
    each token in a batch padded to the longest row; None when all rows have equally many.
    """

    counts: npt.NDArray[np.int64]
    q_lens: torch.Tensor
    starts_anew: torch.Tensor
    groups: dict[str, GroupStep]
    owners: torch.Tensor | None
    places: torch.Tensor | None

    @classmethod
    def of(cls, manager: HybridMemoryManager, plan: Reservation, device: torch.device) -> Step:
        """What the kernels need of the manager's tables for a reservation."""
        rows, counts = plan.rows, plan.num_tokens
        groups = {}
        for group in manager.groups:
            table = manager.tables[group.name]
            if group.is_state:
                entries = torch.from_numpy(table.entries[:, rows, :1])
                groups[group.name] = GroupStep(
                    entries.to(device), torch.empty(0), torch.empty(0), np.empty(0, np.int32)
                )
                continue
            size = group.fmt.block_size
            lengths = table_lengths(plan.start + counts, table.first[rows], table.sink_blocks, size)
            width = -(-int(lengths.max()) // size)
            groups[group.name] = GroupStep(
                torch.from_numpy(table.entries[:, rows, :width]).to(device),
                torch.from_numpy(manager.slots(plan, group.name)).to(device),
                torch.from_numpy(lengths).to(device),
                lengths - counts.astype(np.int32),
            )
        owners = places = None
        if len(set(counts.tolist())) > 1:
            owners = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(device)
            places = torch.from_numpy(np.concatenate([np.arange(count) for count in counts.tolist()])).to(device)
        return cls(
            counts,
            torch.from_numpy(counts.astype(np.int32)).to(device),
            torch.from_numpy(plan.start == 0).to(device),
            groups,
            owners,
            places,
        )

    def padded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens `[tokens, ...]` as `[rows, longest row, ...]`."""
        shape = len(self.counts), int(self.counts.max()), *tokens.shape[1:]
        if self.owners is None:
            return tokens.view(shape)
        padded = tokens.new_zeros(shape)
        padded[self.owners, self.places] = tokens
        return padded

    def unpadded(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `padded`."""
        return rows.flatten(0, 1) if self.owners is None else rows[self.owners, self.places]


class _Update(NamedTuple):
    """A layer's update, on its way to the attention call that follows. `latent` [tokens, width] of MLA layers."""

    place: Place
    step: Step
    latent: torch.Tensor | None


_updated: ContextVar[_Update | None] = ContextVar("kvtide_updated", default=None)


def places_of(manager: HybridMemoryManager, arena: Arena) -> dict[int, Place]:
    """Every layer's place; `ConfigError` for kinds of layer that this bridge does not serve."""
    places = {}
    for group in manager.groups:
        spec = group.fmt.group.spec
        if type(spec) not in SERVED or (isinstance(spec, MLA) and spec.index_head_dim):
            raise ConfigError(
                f"layers {list(group.fmt.group.layers)} are {spec.label} ({spec.kind}), which the transformers bridge "
                "does not serve; it serves full attention, sliding windows, MLA without indexers, and gated delta nets"
            )
        if isinstance(spec, RecurrentState) and not hasattr(Cache, "get_recurrent_state"):
            raise ConfigError(
                f"layers {list(group.fmt.group.layers)} are recurrent, and transformers {transformers.__version__} "
                "keeps their states outside of its cache interface; use 5.24 or later"
            )
        for layer in group.fmt.group.layers:
            views = {part.name: arena.view(layer, part.name) for part in spec.components()}
            places[layer] = Place(layer, spec, group.name, group.fmt.place(layer)[0], views)
    return places


class StepCache(Cache):
    """The library's view of one step: a `Cache` that writes through the step's slots.

    `step` is set for each pass, and `end` called after it.
    """

    def __init__(self, places: dict[int, Place]) -> None:
        super().__init__(layers=[])
        self.places = places
        self.step: Step | None = None

    def end(self) -> None:
        """The pass is over, or has failed: no attention call may take up one of its updates."""
        self.step = None
        _updated.set(None)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the step's keys `[b, kv_heads, n, dim]` and values (of MLA: latent and rotary key) into its slots."""
        place, step = self._at(layer_idx)
        spec = place.spec
        if isinstance(spec, MLA):
            dims = key_states.shape[1], key_states.shape[3], value_states.shape[3]
            if dims != (1, spec.kv_lora_rank, spec.rope_dim):
                raise ConfigError(
                    f"layer {layer_idx} caches {dims[0]} heads of {dims[1]}+{dims[2]} values instead of one latent of "
                    f"{spec.kv_lora_rank}+{spec.rope_dim}: this version of transformers decompresses before it caches; "
                    "use 5.24 or later"
                )
            latent = torch.cat((key_states, value_states), dim=-1).flatten(0, 2)
            slots = step.groups[place.group].slots[place.table]
            write_latent(latent, slots, place.views["latent"], latent_dim=spec.kv_lora_rank, rope_dim=spec.rope_dim)
            _updated.set(_Update(place, step, latent))
            return key_states[:, :, -1:], value_states[:, :, -1:]
        key, value = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
        write_kv(key, value, step.groups[place.group].slots[place.table], place.views["k"], place.views["v"])
        _updated.set(_Update(place, step, None))
        return key_states, value_states

    # -- recurrent layers: the state is gathered from the arena, and scattered back ------------------------------------

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: of its two ways to decode, the one in which a layer asks for its convolution's past and returns it."""
        return True

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether any row of the step has been computed before."""
        return self.step is not None and not bool(self.step.starts_anew.all())

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last columns of the convolution's input `[rows, channels, kernel - 1]`; None when all rows are new."""
        return self._state(layer_idx, "conv")

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """The past columns and the new ones `[rows, channels, n]`, side by side; the last ones are kept."""
        place, step = self._at(layer_idx)
        rows, channels, _ = conv_states.shape
        view = place.views["conv"]
        if (channels, kwargs.get("conv_kernel_size", view.shape[2] + 1)) != (view.shape[1], view.shape[2] + 1):
            raise ConfigError(
                f"layer {layer_idx} convolves {channels} channels by {kwargs.get('conv_kernel_size')}; its config "
                f"stands for {view.shape[1]} by {view.shape[2] + 1}"
            )
        past = self._state(layer_idx, "conv")
        if past is None:
            past = conv_states.new_zeros((rows, *view.shape[1:]))
        whole = torch.cat((past.to(conv_states.dtype), conv_states), dim=-1)
        view[self._entries(place, step)] = whole[..., -view.shape[2] :].to(view.dtype)
        return whole

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The state `[rows, heads, key_dim, value_dim]`, zero for new rows; None when all are new."""
        return self._state(layer_idx, "ssm")

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep the state after the step's last token."""
        place, step = self._at(layer_idx)
        view = place.views["ssm"]
        if recurrent_states.shape[1:] != view.shape[1:]:
            raise ConfigError(
                f"layer {layer_idx} has a state of {list(recurrent_states.shape[1:])}; its config stands for "
                f"{list(view.shape[1:])}"
            )
        view[self._entries(place, step)] = recurrent_states.to(view.dtype)
        return recurrent_states

    def _at(self, layer: int) -> tuple[Place, Step]:
        if self.step is None:
            raise KvtideError("this cache belongs to a PagedModel, which sets its step; pass KvtideCache to generate")
        if layer not in self.places:
            raise ConfigError(f"layer {layer} caches something; by the model's config it stores nothing")
        return self.places[layer], self.step

    def _entries(self, place: Place, step: Step) -> torch.Tensor:
        return step.groups[place.group].table[place.table, :, 0].long()

    def _state(self, layer: int, name: str) -> torch.Tensor | None:
        place, step = self._at(layer)
        if not self.has_previous_state():
            return None
        state = place.views[name][self._entries(place, step)]
        state[step.starts_anew] = 0  # a new row's block holds what was there before
        return state


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The library's attention interface: `query` [b, heads, n, dim] over what the step's tables hold.

    Keys, values and mask are not read: the update before stored the keys, and the tables and lengths say what is
    visible. `softcap` bounds the scores, `s_aux` [heads] are sink logits. Returns `[b, n, heads, value_dim]`.
    """
    update = _updated.get()
    _updated.set(None)
    if update is None or update.place.layer != getattr(module, "layer_idx", update.place.layer):
        raise KvtideError(
            f"layer {getattr(module, 'layer_idx', '?')} runs kvtide's attention without a KvtideCache; pass one as "
            "cache=, or close it, which gives the model its own attention back"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if dropout or not causal:
        raise ConfigError(f"kvtide's attention is causal and has no dropout, not is_causal={causal}, dropout={dropout}")
    place, step, latent = update
    spec, group = place.spec, step.groups[place.group]
    held = spec.window if isinstance(spec, SlidingWindow | SlidingWindowMLA) else None
    window = held if sliding_window is None else sliding_window
    if held is not None and window is not None and window > held:
        raise ConfigError(f"layer {place.layer} has a window of {window} tokens; by its config {held} are held")
    batch, heads, count, dim = query.shape
    tokens = query.transpose(1, 2).flatten(0, 1)
    scale = dim**-0.5 if scaling is None else scaling
    if isinstance(spec, MLA):
        assert latent is not None
        out = _attend_latents(module, tokens, latent, place, step, scale, window)
    else:
        padded = paged_attention(
            step.padded(tokens),
            place.views["k"],
            place.views["v"],
            group.table[place.table],
            group.lengths,
            scale=scale,
            window=window,
            sinks=s_aux,
            soft_cap=softcap,
            q_lens=None if step.owners is None else step.q_lens,
        ).out
        out = step.unpadded(padded)
    return out.view(batch, count, heads, -1), None


def _attend_latents(
    module: torch.nn.Module,
    query: torch.Tensor,
    latent: torch.Tensor,
    place: Place,
    step: Step,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Absorbed attention of `query` [tokens, heads, nope_dim + rope_dim]: `[tokens, heads, value_dim]`."""
    spec, group = place.spec, step.groups[place.group]
    assert isinstance(spec, MLA)
    weight = getattr(getattr(module, "kv_b_proj", None), "weight", None)
    if weight is None or weight.dtype != query.dtype or weight.shape[1] != spec.kv_lora_rank:
        raise ConfigError(
            f"layer {place.layer} needs a kv_b_proj whose weight is {spec.kv_lora_rank} wide and {query.dtype}, to run "
            "absorbed; a quantised one is not served"
        )
    nope = query.shape[2] - spec.rope_dim
    w_uk, w_uv = weight.detach().view(query.shape[1], -1, spec.kv_lora_rank).tensor_split([nope], dim=1)
    projections = UpProjections(w_uk, w_uv.transpose(1, 2))
    common: dict[str, Any] = {
        "scale": scale,
        "latent_dim": spec.kv_lora_rank,
        "rope_dim": spec.rope_dim,
        "window": window,
    }
    cache, table = place.views["latent"], group.table[place.table]
    if step.counts.max() > MAX_QUERY_TOKENS:
        cu_q_lens = np.concatenate(([0], np.cumsum(step.counts)))
        return mla_prefill(
            query.contiguous(), latent, cu_q_lens, cache, table, group.context, projections, **common
        ).out
    q_lens = None if step.owners is None else step.q_lens
    padded = mla_decode(
        step.padded(query.contiguous()), cache, table, group.lengths, q_lens=q_lens, projections=projections, **common
    ).out
    return step.unpadded(padded)


AttentionInterface.register(ATTENTION_NAME, attention)
