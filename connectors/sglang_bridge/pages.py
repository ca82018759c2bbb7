"""SGLang's host pools as values: where a page's bytes lie, and what names them.

    page_first and its kin    a page is one run of bytes, or one each for K and V (for each state): a value a run
    layer_first               a page is a run in every layer: one value, gathered
    flat (old interface)      a page is a flat tensor that SGLang has gathered: one value

A host pool says where its pages lie (`get_page_buffer_meta`), SGLang names a page by a hash over all tokens up to its
end, seeded with salt and adapter. The key's space (`offload.keys`) says the rest: weights, pool, layout, element
format, layers, heads, tokens of a page.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from kvtide.kvcache import ConfigError
from kvtide.offload.keys import CHAIN_BYTES, REPLICATED, HeadPart, StoreKey, ValueSpace, store_key

# What of a pool's geometry does not follow from its bytes.
_GEOMETRY = (
    "storage_format_tag",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "layer_num",
    "temporal_dtype",
    "conv_dtype",
)


class Run(NamedTuple):
    """Bytes in this process's memory."""

    address: int
    num_bytes: int


Value = Sequence[Run]


class Shard(NamedTuple):
    """Which part of the model a process holds. `context` tells apart processes that share a page's tokens."""

    tp_rank: int
    tp_size: int
    context: str = ""


class PoolPages:
    """One host pool's pages. `split` cuts the heads of each page into so many values (SGLang's `tp_lcm_size`).

    A page has `values_per_page` values, all of which must be there for the page to be.
    """

    def __init__(
        self,
        name: str,
        pool: Any,
        *,
        weights: str,
        shard: Shard,
        replicated: bool,
        split: int,
        page_tokens: int,
        flat: bool,
    ) -> None:
        self.name = name
        self.page_slots: int = getattr(pool, "logical_page_size", None) or pool.page_size
        self.layout = str(getattr(pool, "layout", ""))
        self._pool = pool
        self._split = split
        self._gathers = flat or self.layout == "layer_first"
        self.is_replicated = replicated
        try:
            runs = self._runs(_first_slots(self.page_slots))
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(f"SGLang's host pool {name!r} cannot be stored: {error}") from None
        self.values_per_page = 1 if self._gathers else len(runs)
        self.value_bytes = [sum(run.num_bytes for run in runs)] if self._gathers else [run.num_bytes for run in runs]
        self.page_bytes = sum(self.value_bytes)
        per_head = self.values_per_page // split
        geometry = [str(getattr(pool, attribute, None)) for attribute in _GEOMETRY]
        start = int(getattr(pool, "start_layer", None) or 0)
        end = int(getattr(pool, "end_layer", None) or start)
        self._spaces = []
        for place, num_bytes in enumerate(self.value_bytes):
            head, part = divmod(place, per_head)
            kind = [
                name,
                type(pool).__name__,
                self.layout,
                str(pool.dtype),
                *geometry,
                num_bytes,
                part,
                flat,
                shard.context,
            ]
            self._spaces.append(
                ValueSpace(
                    model=weights,
                    revision="",  # it is part of the name, where the name does not say it all
                    layer_spec=json.dumps(kind),
                    layers=tuple(range(start, end)),
                    heads=REPLICATED if replicated else HeadPart(shard.tp_rank * split + head, shard.tp_size * split),
                    block_tokens=page_tokens,
                ).digest()
            )

    @property
    def spaces(self) -> frozenset[bytes]:
        """What the keys of all its values begin with."""
        return frozenset(self._spaces)

    def keys(self, hashes: Sequence[str]) -> list[StoreKey]:
        """Keys of the pages' values, page after page."""
        keys = []
        for page in hashes:
            chain = blake2b(page.encode(), digest_size=CHAIN_BYTES, person=b"kvtide-sglang").digest()
            keys += [store_key(space, chain) for space in self._spaces]
        return keys

    def values(self, host_indices: Any) -> list[Value]:
        """Where the values lie of the pages that start at every `page_slots`-th index, page after page."""
        runs = self._runs(host_indices)
        step = len(runs) * self.page_slots // len(host_indices) if self._gathers else 1
        return [runs[at : at + step] for at in range(0, len(runs), step)]

    def _runs(self, host_indices: Any) -> list[Run]:
        if self._split > 1:
            addresses, sizes = self._pool.get_split_heads_page_buffer_meta(host_indices, self._split)
        else:
            addresses, sizes = self._pool.get_page_buffer_meta(host_indices)
        return [Run(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]


def whole_pages(statuses: Sequence[bool], values_per_page: int) -> list[bool]:
    """Whether all of each page's values are well."""
    return [all(statuses[at : at + values_per_page]) for at in range(0, len(statuses), values_per_page)]


def leading(pages: Sequence[bool]) -> int:
    """How many pages from the first on are there."""
    return list(pages).index(False) if False in pages else len(pages)


def _first_slots(count: int) -> Any:
    import torch

    return torch.arange(count)
