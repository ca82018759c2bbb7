"""Settings of the vLLM bridge: what stands in `kv_connector_extra_config` of vLLM's own `kv_transfer_config`.

    {"store": {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": "/var/kv"}}}

`store` is an ordinary configuration of a kvtide store, in which `{rank}` is the worker's number (`per_rank`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvtide.connectors.config import TransferConfig, checked, load_config
from kvtide.connectors.per_rank import for_rank
from kvtide.kvcache.sizes import parse_bytes

LABEL = "KvtideConnector's kv_connector_extra_config"


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `kvtide.connectors.vllm.KvtideConnector`."""

    store: Annotated[dict[str, Any], Meta(description="The store: kv_connector and its kv_connector_extra_config.")]
    weights: Annotated[
        str | None,
        Meta(description="Name of the weights; by default the model's name and revision, or a digest of its files."),
    ] = None
    window_interval: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Windows are stored where prompts and requests end and every so many tokens, 0 for nowhere "
            "else; four windows by default."
        ),
    ] = None
    staging_bytes: Annotated[
        int | str, Meta(description="Host memory through which values go: half for loads, half for saves.")
    ] = "1GiB"
    io_threads: Annotated[int, Meta(description="Threads that load, and as many that save.", ge=1, le=64)] = 4
    look_up_timeout_s: Annotated[float, Meta(description="A look-up that takes longer counts as a miss.", gt=0)] = 1.0
    transfer_timeout_s: Annotated[
        float, Meta(description="A load that takes longer has failed; a save that takes longer is given up.", gt=0)
    ] = 10.0

    @property
    def staging_size(self) -> int:
        """`staging_bytes` as a number."""
        return parse_bytes(self.staging_bytes)


def read_settings(extra_config: Mapping[str, Any]) -> VllmSettings:
    """The settings, checked with those of the store; `ConfigError` names the key, its value, and what is allowed."""
    settings = checked(extra_config, VllmSettings, LABEL)
    _ = settings.staging_size
    store_config(settings, rank=0)
    return settings


def store_config(settings: VllmSettings, *, rank: int) -> TransferConfig:
    """The configuration of one worker's store."""
    return load_config(for_rank(settings.store, rank))
