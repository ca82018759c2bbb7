"""Options of `kvtide simulate` that describe offload: tiers and their speeds, what is stored when, preemption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from kvtide.connectors.config import TransferConfig, checked, load_config, store_settings
from kvtide.connectors.stack.tiers import TierConfig
from kvtide.kvcache import ConfigError
from kvtide.kvcache.sizes import parse_bytes
from kvtide.sims.serving.gpus import GpuSpec
from kvtide.sims.serving.offloading import PREEMPTIONS, Offload, store_policy_of
from kvtide.sims.serving.tiers import WRITE_POLICIES, TierSpec, parse_tier

Function = TypeVar("Function", bound=Callable[..., Any])


def offload_options(function: Function) -> Function:
    """The options; the command receives them by name and passes them to `offload_of`."""
    options = [
        click.option(
            "--offload-tier",
            "offload_tiers",
            multiple=True,
            metavar="NAME:SIZE:BANDWIDTH[:LATENCY][:KEY=VALUE...]",
            help="A tier below the device, the nearest first, e.g. host:64GB:50GB/s:10us. SIZE is for the whole "
            "engine, BANDWIDTH each way for one rank; keys are eviction (lru, s3fifo, arc) and min_uses.",
        ),
        click.option(
            "--kv-transfer-config",
            metavar="JSON|FILE",
            help="The connector configuration instead: sizes and policies come from it, speeds from --offload-tier "
            "NAME::BANDWIDTH[:LATENCY] with the connectors' names.",
        ),
        click.option("--offload-write-policy", type=click.Choice(WRITE_POLICIES), help="By default write_through."),
        click.option(
            "--offload-windows",
            metavar="WHERE,...",
            help="Where a window's blocks are stored: prompt_ends, turn_ends, junctions, every:TOKENS, or none; by "
            "default the first three.",
        ),
        click.option(
            "--offload-rule",
            "offload_rules",
            multiple=True,
            metavar="EVENT:KIND=ACTION",
            help="What becomes of a block, e.g. evicted:full_attention=store or out_of_window:sliding_window=drop.",
        ),
        click.option(
            "--preemption",
            type=click.Choice(PREEMPTIONS),
            default="recompute",
            show_default=True,
            help="What a preempted request's KV is: computed again, swapped out and loaded back, or what is faster.",
        ),
        click.option(
            "--swap-space",
            metavar="SIZE[:BANDWIDTH]",
            help="Host memory for swapped requests alone, without tiers; by default at the device's PCIe rate.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def offload_of(
    gpu: GpuSpec,
    *,
    offload_tiers: Sequence[str],
    kv_transfer_config: str | None,
    offload_write_policy: str | None,
    offload_windows: str | None,
    offload_rules: Sequence[str],
    preemption: str,
    swap_space: str | None,
) -> Offload | None:
    """Offload as the options describe it, None without any; `ConfigError` for options that contradict each other."""
    write_policy = offload_write_policy or "write_through"
    policy = store_policy_of(offload_windows, offload_rules)
    stores = loads = True
    if kv_transfer_config is not None:
        config = load_config(kv_transfer_config)
        stores, loads = config.stores, config.loads
        tiers, configured = _configured(config, offload_tiers)
        if offload_write_policy is None:
            write_policy = configured
    else:
        tiers = [parse_tier(text) for text in offload_tiers]
    if tiers and swap_space is not None:
        raise ConfigError("--swap-space is for runs without tiers; preempted requests are swapped to the first tier")
    if tiers:
        return Offload(tuple(tiers), policy, write_policy, preemption, stores=stores, loads=loads)
    if offload_write_policy or offload_windows is not None or offload_rules:
        raise ConfigError("offload policies need a tier: give --offload-tier or --kv-transfer-config")
    if preemption == "recompute":
        if swap_space is not None:
            raise ConfigError("swap space is for preempted requests; give --preemption swap or auto")
        return None
    if swap_space is None:
        raise ConfigError(f"--preemption {preemption} needs room to swap to: give --swap-space or --offload-tier")
    size, _, speed = swap_space.partition(":")
    spec = parse_tier(f"swap:{size}:{speed}") if speed else TierSpec("swap", parse_bytes(size), gpu.host_link)
    return Offload((spec,), preemption=preemption, only_swap=True)


def _configured(config: TransferConfig, speeds: Sequence[str]) -> tuple[list[TierSpec], str]:
    """Tiers of a connector configuration, and its write policy. Speeds are by the connectors' names."""
    extra = config.kv_connector_extra_config
    if config.kv_connector == "MultiConnector":
        layers = [checked(entry, TierConfig, "MultiConnector's connectors") for entry in extra["connectors"]]
        write_policy = extra.get("write_policy", "write_through")
        if write_policy not in WRITE_POLICIES:
            raise ConfigError(
                f"write policy {write_policy!r} cannot be simulated; allowed: {', '.join(WRITE_POLICIES)}"
            )
    else:
        layers = [checked({"kv_connector": config.kv_connector, "kv_connector_extra_config": extra}, TierConfig, "")]
        write_policy = "write_through"
    given = {}
    for text in speeds:
        name, empty, speed = text.partition("::")
        if not empty or not speed:
            raise ConfigError(
                f"with --kv-transfer-config --offload-tier {text[:60]!r} must be NAME::BANDWIDTH[:LATENCY]"
            )
        given[name] = speed
    tiers = []
    for layer in layers:
        name = layer.kv_connector
        if layer.kv_role != "kv_both" or layer.ttl_s is not None:
            raise ConfigError(f"{name}: a tier with a role or a ttl_s of its own cannot be simulated")
        settings = store_settings(name, layer.kv_connector_extra_config, layer.kv_connector_module_path)
        size = getattr(settings, "max_bytes", None)
        if size is None:
            raise ConfigError(f"{name} has no max_bytes, so that its tier has no size; use --offload-tier instead")
        if name not in given:
            raise ConfigError(f"how fast is {name}? give --offload-tier {name}::BANDWIDTH[:LATENCY]")
        eviction = getattr(settings, "eviction", "lru")
        tiers.append(parse_tier(f"{name}:{size}:{given.pop(name)}:eviction={eviction}:min_uses={layer.min_uses}"))
    if given:
        raise ConfigError(
            f"--kv-transfer-config has no connector {next(iter(given))}; it has {', '.join(t.name for t in tiers)}"
        )
    return tiers, write_policy
