"""`kvtide plan`: how many requests, and how long a context, fit in a memory budget under each policy."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from kvtide.kvcache.geometry import PageGeometry
from kvtide.kvcache.layout import ModelLayout
from kvtide.sims.capacity import Capacity, VllmCapacity, plan_capacity, vllm_capacity

from .options import (
    block_options,
    console,
    geometries,
    human_bytes,
    json_option,
    load_layout,
    model_options,
    parse_size,
    policy_option,
    print_json,
    require_positive,
)


@click.command("plan")
@model_options
@click.option("--memory", callback=parse_size, required=True, help="KV memory of one rank, e.g. 80GiB.")
@click.option("--tokens", type=int, required=True, help="Tokens of each request, prompt and output.")
@click.option(
    "--image-tokens", type=int, default=0, show_default=True, help="Image tokens of each request, besides --tokens."
)
@click.option(
    "--max-num-batched-tokens", type=int, default=8192, show_default=True, help="Tokens that one step may process."
)
@click.option(
    "--steps-in-flight", type=int, default=2, show_default=True, help="Steps in flight; 2 with asynchronous scheduling."
)
@policy_option
@block_options
@json_option
def command(
    model: str,
    kv_dtype: str,
    tp: int,
    speculative: str | None,
    memory: int,
    tokens: int,
    image_tokens: int,
    max_num_batched_tokens: int,
    steps_in_flight: int,
    policies: tuple[str, ...],
    block_size: int,
    min_block_size: int,
    as_json: bool,
) -> None:
    """Show how many requests of a given length fit, and the longest context that fits, under each policy.

    A request is charged the pages of its worst moment; tokens in flight are charged once for the pool. The peer's
    figure beside it is vLLM's start-up formula, which charges them to every request.

    \b
    Examples:
      kvtide plan --model gemma-3-27b --memory 80GiB --tokens 131072
      kvtide plan --model deepseek-v3.2 --kv-dtype fp8_ds_mla --memory 60GiB --tokens 32768 --json
    """
    for name, value in (
        ("--tokens", tokens),
        ("--max-num-batched-tokens", max_num_batched_tokens),
        ("--steps-in-flight", steps_in_flight),
    ):
        require_positive(name, value)
    if image_tokens:
        require_positive("--image-tokens", image_tokens)
    layout = load_layout(model, kv_dtype, tp, speculative)
    plans = geometries(layout, policies, block_size, min_block_size)
    in_flight = max_num_batched_tokens * steps_in_flight
    capacities = {plan.policy: plan_capacity(plan, memory, tokens, image_tokens, in_flight) for plan in plans}
    peer = None
    if not layout.has_cross_attention:
        peer = vllm_capacity(layout, memory, tokens + image_tokens, block_size, in_flight)
    if as_json:
        print_json(_as_json(layout, memory, tokens, image_tokens, in_flight, capacities, peer))
    else:
        _print(layout, memory, tokens, image_tokens, in_flight, plans, capacities, peer)


def _as_json(
    layout: ModelLayout,
    memory: int,
    tokens: int,
    image_tokens: int,
    in_flight: int,
    capacities: dict[str, Capacity],
    peer: VllmCapacity | None,
) -> dict[str, Any]:
    return {
        "model": layout.name,
        "memory_bytes": memory,
        "tokens": tokens,
        "image_tokens": image_tokens,
        "in_flight_tokens": in_flight,
        "max_model_len": layout.max_model_len,
        "policies": {policy: capacity._asdict() for policy, capacity in capacities.items()},
        "vllm": peer._asdict() if peer else None,
    }


def _print(
    layout: ModelLayout,
    memory: int,
    tokens: int,
    image_tokens: int,
    in_flight: int,
    plans: list[PageGeometry],
    capacities: dict[str, Capacity],
    peer: VllmCapacity | None,
) -> None:
    out = console()
    images = f" and {image_tokens:,} image tokens" if image_tokens else ""
    table = Table(
        title=f"{layout.name} in {human_bytes(memory)} a rank: requests of {tokens:,} tokens{images}, "
        f"{in_flight:,} in flight",
        title_justify="left",
    )
    for heading in ("policy", "requests that fit", "a request takes", "in flight (once)", "longest context"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for plan in plans:
        capacity = capacities[plan.policy]
        table.add_row(
            plan.policy,
            f"{capacity.max_concurrency:,}",
            human_bytes(capacity.bytes_per_request),
            human_bytes(capacity.in_flight_bytes) if capacity.in_flight_bytes else "–",
            "no limit" if capacity.max_context is None else f"{capacity.max_context:,}",
        )
    if peer:
        table.add_row(
            "vLLM's own figure",
            f"{peer.max_concurrency:.2f}",
            f"{peer.blocks_per_request:,} blocks",
            "per request",
            "",
            style="dim",
        )
    out.print(table)
    if layout.max_model_len:
        out.print(
            f"note: {layout.name} was made for at most {layout.max_model_len:,} tokens", style="dim", highlight=False
        )
    for note in layout.notes:
        out.print(f"note: {note}", style="dim", highlight=False)
