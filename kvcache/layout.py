"""`ModelLayout`: the layers of one model as a KV cache sees them, and the groups that equal specs form.

A layout is frozen. It is read from a config (`from_hf`, `from_mistral_params`, `from_yaml`, `preset`), then narrowed:
`with_dtype`, `with_draft`, `stage` (pipeline), `shard` (tensor parallelism) each return a new one. Every field that
decided something is listed in `sources` with the place it came from; everything a reader should know is in `notes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from .dtypes import PACKED_LATENT_FORMATS, canonical_dtype
from .errors import ConfigError
from .specs import MLA, FullAttention, LayerSpec

# Far beyond any model, and small enough for sizes of blocks and pages to fit int64.
MAX_BYTES = 2**36


@dataclass(frozen=True)
class Layer:
    """One layer, number `index` of the model. `spec` is None when it stores nothing.

    `shares` then is the number of the layer whose KV it reads, if any. `draft`: a layer of a drafter, not of the model.
    """

    index: int
    spec: LayerSpec | None
    shares: int | None = None
    draft: bool = False


class Source(NamedTuple):
    """Where one field of a layout came from: its value, and a place such as a key path or a class default."""

    field: str
    value: str
    origin: str


@dataclass(frozen=True)
class Group:
    """All layers with one spec: they share a block table. `name` is the kind, numbered when a kind occurs twice."""

    name: str
    spec: LayerSpec
    layers: tuple[int, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers of the group."""
        return self.spec.bytes_per_token * len(self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state in all layers of the group."""
        return self.spec.state_bytes * len(self.layers)


@dataclass(frozen=True)
class ModelLayout:
    """The KV-storing layers of one model on one rank.

    `draft_specs` are the layers that the model's own multi-token-prediction modules would add (`with_draft`).
    `max_model_len` is the longest sequence that the model was made for, None when its config does not say.
    """

    name: str
    layers: tuple[Layer, ...]
    max_model_len: int | None = None
    draft_specs: tuple[LayerSpec, ...] = ()
    tp_size: int = 1
    sources: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not any(layer.spec for layer in self.layers):
            raise ConfigError(f"model {self.name!r} has no layer that stores KV")
        if self.bytes_per_token > MAX_BYTES or self.state_bytes > MAX_BYTES:
            raise ConfigError(
                f"model {self.name!r} would take {self.bytes_per_token} bytes a token and {self.state_bytes} bytes of "
                f"state; at most {MAX_BYTES} of either can be laid out"
            )
        stored = {layer.index: layer.spec is not None for layer in self.layers}
        if len(stored) < len(self.layers):
            raise ConfigError(f"two layers of model {self.name!r} have the same index")
        for layer in self.layers:
            if layer.shares is not None and (layer.spec is not None or not stored.get(layer.shares)):
                raise ConfigError(
                    f"layer {layer.index} of model {self.name!r} cannot share the KV of layer {layer.shares}: "
                    "it must store nothing itself, and the other must store its own"
                )

    @classmethod
    def from_hf(cls, config: str | Path | Mapping[str, Any]) -> ModelLayout:
        """Read a Hugging Face `config.json` (a path to it or to its folder, or its parsed content)."""
        from .hf_config import read_hf_config

        return read_hf_config(config)

    @classmethod
    def from_mistral_params(cls, params: str | Path | Mapping[str, Any]) -> ModelLayout:
        """Read Mistral's own `params.json`, whose `sliding_window` may be a list repeated over the layers."""
        from .hf_config import read_mistral_params

        return read_mistral_params(params)

    @classmethod
    def from_yaml(cls, source: str | Path | Mapping[str, Any]) -> ModelLayout:
        """Read a layout that is written out layer by layer: a YAML file's path, or its parsed content."""
        from .yaml_layout import read_yaml_layout

        return read_yaml_layout(source)

    @classmethod
    def preset(cls, name: str) -> ModelLayout:
        """A bundled model by name (`preset_names()` lists them); upper case and aliases are understood."""
        from .presets import load_preset

        return load_preset(name)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups of equal specs, in the order of their first layers."""
        members: dict[LayerSpec, list[int]] = {}
        for layer in self.layers:
            if layer.spec is not None:
                members.setdefault(layer.spec, []).append(layer.index)
        seen: dict[str, int] = {}
        groups = []
        for spec, layers in members.items():
            number = seen[spec.kind] = seen.get(spec.kind, 0) + 1
            name = f"{spec.kind}" if number == 1 else f"{spec.kind}_{number}"
            groups.append(Group(name, spec, tuple(layers)))
        return tuple(groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token when every layer stores it."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def state_bytes(self) -> int:
        """Bytes of all recurrent states of one sequence."""
        return sum(group.state_bytes for group in self.groups)

    @property
    def has_cross_attention(self) -> bool:
        """Whether image tokens live in layers of their own instead of in the text sequence."""
        return any(group.spec.per_image for group in self.groups)

    def with_dtype(self, dtype: str) -> ModelLayout:
        """The same model with another KV cache dtype; packed formats change MLA layers and leave others as they are."""
        if dtype == "auto":
            return self
        canonical = canonical_dtype(dtype)
        if canonical in PACKED_LATENT_FORMATS and not any(isinstance(group.spec, MLA) for group in self.groups):
            raise ConfigError(f"KV cache dtype {dtype!r} packs MLA latents; {self.name} has no MLA layer")
        packed = canonical in PACKED_LATENT_FORMATS
        return self._map_specs(
            lambda spec: spec if packed and not isinstance(spec, MLA) else spec.with_dtype(canonical)
        )

    def with_draft(self, specs: Iterable[LayerSpec] | None = None) -> ModelLayout:
        """Add draft layers: the given ones (EAGLE heads), or the model's own MTP modules when none are given."""
        added = self.draft_specs if specs is None else tuple(specs)
        if not added:
            raise ConfigError(
                f"the config of {self.name} declares no multi-token-prediction layers; "
                "give the draft layers (on the command line, --speculative eagle)"
            )
        start = 1 + max(layer.index for layer in self.layers)
        drafts = tuple(Layer(start + i, spec, draft=True) for i, spec in enumerate(added))
        return replace(self, layers=self.layers + drafts, draft_specs=())

    def eagle_spec(self) -> LayerSpec:
        """The layer of a one-layer EAGLE head: shaped like this model's own full attention (or MLA) layers."""
        for group in self.groups:
            if type(group.spec) in (FullAttention, MLA):
                return group.spec
        raise ConfigError(f"{self.name} has no full attention layer that an EAGLE head could be shaped like")

    def stage(self, first: int, last: int) -> ModelLayout:
        """The layers `first` (included) to `last` (excluded) of one pipeline stage."""
        if not 0 <= first < last:
            raise ConfigError(f"pipeline stage [{first}, {last}) of {self.name} is empty or negative")
        layers = tuple(layer for layer in self.layers if first <= layer.index < last)
        present = {layer.index for layer in layers}
        for layer in layers:
            if layer.shares is not None and layer.shares not in present:
                raise ConfigError(
                    f"layer {layer.index} of {self.name} reads the KV of layer {layer.shares}; "
                    f"stage [{first}, {last}) must hold both"
                )
        # Only the last stage runs a drafter: it needs the last layers' hidden states.
        is_last = layers[-1:] == self.layers[-1:]
        return replace(self, layers=layers, draft_specs=self.draft_specs if is_last else ())

    def shard(self, tp_size: int) -> ModelLayout:
        """The layout of one of `tp_size` tensor-parallel ranks."""
        if tp_size < 1:
            raise ConfigError(f"tp_size {tp_size} must be at least 1")
        if self.tp_size != 1:
            raise ConfigError(f"{self.name} is sharded {self.tp_size} ways already; it cannot be sharded again")
        return replace(self._map_specs(lambda spec: spec.shard(tp_size)), tp_size=tp_size)

    def _map_specs(self, change: Callable[[LayerSpec], LayerSpec]) -> ModelLayout:
        layers = tuple(
            layer if layer.spec is None else replace(layer, spec=change(layer.spec)) for layer in self.layers
        )
        return replace(self, layers=layers, draft_specs=tuple(change(spec) for spec in self.draft_specs))
