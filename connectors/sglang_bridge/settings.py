"""Settings of the SGLang bridge: what stands in `--hicache-storage-backend-extra-config`, beside SGLang's own keys.

    {"backend_name": "kvtide", "module_path": "kvtide.connectors.sglang", "class_name": "KvtideHiCacheStorage",
     "interface_v1": 1,
     "store": {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": "/var/kv"}}}

`store` is an ordinary configuration of a kvtide store, in which `{rank}` is the process's number (`per_rank`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvtide.connectors.config import TransferConfig, checked, load_config
from kvtide.connectors.per_rank import for_rank, leaf_stores
from kvtide.kvcache.sizes import parse_bytes

LABEL = "KvtideHiCacheStorage's hicache-storage-backend-extra-config"
# What SGLang reads itself; it takes some of them out before a backend sees the rest, depending on who makes it.
SGLANG_KEYS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    }
)
# Stores of this process and this machine, whose calls end soon or never; see `SglangSettings.zero_copy`.
_AT_HAND = frozenset({"HostConnector", "LMDBConnector"})


class SglangSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `kvtide.connectors.sglang.KvtideHiCacheStorage`."""

    store: Annotated[dict[str, Any], Meta(description="The store: kv_connector and its kv_connector_extra_config.")]
    weights: Annotated[
        str | None,
        Meta(description="Name of the weights; by default the model's name and commit, or a digest of its files."),
    ] = None
    zero_copy: Annotated[
        bool | None,
        Meta(
            description="Whether the store reads and writes SGLang's host pages themselves. Then a call that hangs "
            "holds SGLang's storage thread until it ends, since its pages cannot be given away; without, values go "
            "through staging memory and transfer_timeout_s always holds. By default only for LMDB and host memory."
        ),
    ] = None
    staging_bytes: Annotated[
        int | str, Meta(description="Host memory for values that are not copied directly: half to load, half to save.")
    ] = "512MiB"
    io_threads: Annotated[int, Meta(description="Threads that load, and as many that save.", ge=1, le=64)] = 4
    look_up_timeout_s: Annotated[float, Meta(description="A look-up that takes longer counts as a miss.", gt=0)] = 1.0
    transfer_timeout_s: Annotated[
        float, Meta(description="A batch of pages that takes longer to load or save has failed.", gt=0)
    ] = 10.0

    @property
    def staging_size(self) -> int:
        """`staging_bytes` as a number."""
        return parse_bytes(self.staging_bytes)

    @property
    def is_zero_copy(self) -> bool:
        """`zero_copy`, or its default for this store."""
        if self.zero_copy is not None:
            return self.zero_copy
        return all(leaf.get("kv_connector") in _AT_HAND for leaf in leaf_stores(self.store))


def read_settings(extra_config: Mapping[str, Any]) -> SglangSettings:
    """The settings, checked with those of the store; `ConfigError` names the key, its value, and what is allowed."""
    own = {key: value for key, value in extra_config.items() if key not in SGLANG_KEYS}
    settings = checked(own, SglangSettings, LABEL)
    _ = settings.staging_size
    store_config(settings, rank=0)
    return settings


def store_config(settings: SglangSettings, *, rank: int) -> TransferConfig:
    """The configuration of one process's store."""
    return load_config(for_rank(settings.store, rank))
