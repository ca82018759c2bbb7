"""Which blocks are worth a tier: eviction policies, admission, and where windows are stored, on real traces.

    python benchmarks/offload_policies.py [--quick] [--json FILE]

Needs `traces/mooncake/synthetic_trace.jsonl` and `traces/weka_claude_code` in the folder that `KVTIDE_SHARED` names, by
default `shared` beside the repository; without them every figure is null. Nothing is timed: figures are shares of
prompt tokens that were hit, and bytes.

    evict/TRACE/SIZE/POLICY    the tier alone, through `offload.eviction` (and TinyLFU where the name says so): every
                               prompt is looked up block by block as far as it is there, and what is missing is put.
                               With `prefix` the tier is then told that the prompt's blocks are one prefix, as
                               `OffloadManager` does, so that the first go last; without it nobody tells.
                               SIZE is the tier's, as a share of all different blocks of the trace; `peer` is LRU, so a
                               ratio below 1 means more hits than LRU
    window/TRACE/MODEL/WHERE   the whole manager, `OffloadManager` and a tier in virtual time, one request after the
                               other, with a device that forgets everything in between; WHERE is `StorePolicy`'s
                               choice. `peer` is the share that a model with full attention alone would hit: the
                               ceiling, so that the ratio is 1 where every prefix that could be hit is
    stored/TRACE/MODEL/WHERE   bytes of windows written for it, in GiB; `peer` are those of full attention beside it

Weka's conversations run interleaved by time, as the reader gives them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import click
import numpy as np
from report import Figure, common_options, publish

from kvtide.hma import HybridMemoryManager
from kvtide.kvcache import FullAttention, ModelLayout
from kvtide.kvcache.policies import plan_geometry
from kvtide.offload.eviction import POLICIES
from kvtide.offload.transfers import Value
from kvtide.offload.values import HEADER_BYTES
from kvtide.sims.serving.offloading import Offload, OffloadedRows, store_policy_of
from kvtide.sims.serving.tiers import TierSpec, TierStack
from kvtide.sims.tokens import output_tokens, prompt_tokens
from kvtide.sims.traces import Request, open_trace

SHARED = Path(os.environ.get("KVTIDE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
TRACES = {"mooncake": "traces/mooncake/synthetic_trace.jsonl", "weka": "traces/weka_claude_code"}
BLOCK_BYTES = 1 << 20
SHARES = (0.01, 0.05, 0.2, 0.5)
WHERE = {
    "none": "none",
    "prompt_ends": "prompt_ends",
    "junctions": "junctions",
    "default": "prompt_ends,turn_ends,junctions",
    "default+16384": "prompt_ends,turn_ends,junctions,every:16384",
    "default+4096": "prompt_ends,turn_ends,junctions,every:4096",
    "every_1024": "every:1024",
}
MODELS = ("gemma-3-12b", "gpt-oss-120b")
STEP = 8192
BLOCK = {"mooncake": 128, "weka": 64}


def load(name: str, num_requests: int | None) -> list[Request]:
    """The requests of a trace in order of time; none where it is absent."""
    path = SHARED / TRACES[name]
    if not path.exists():
        return []
    requests = [request for request in open_trace(path) if request.input_tokens > 0]
    return sorted(requests, key=lambda request: request.arrival_s)[:num_requests]


# -- eviction ---------------------------------------------------------------------------------------------------------


def hit_share(requests: Sequence[Request], capacity: int, eviction: str, min_uses: int, as_prefix: bool) -> float:
    """Share of the prompts' tokens that one tier serves: as far as all blocks from the first are there.

    `as_prefix`: the tier is told which blocks are one prefix.
    """
    spec = TierSpec("tier", capacity, 1.0, 0.0, eviction, min_uses)
    stack = TierStack([spec], [capacity], {0: "full_attention"}, "write_through")
    hit = tokens = 0
    for request in requests:
        values = [
            Value(identity.to_bytes(32, "little"), ((0, BLOCK_BYTES),), (0,)) for identity in request.hash_ids or ()
        ]
        here = next((n for n, value in enumerate(values) if stack.where(value.key) is None), len(values))
        for value in values[:here]:  # one by one: of a batch the first would go last already
            stack.read([value.key])
        for value in values[here:]:
            stack.write([value])
        if as_prefix:
            stack.touch_prefix([value.key for value in values])
        hit += min(here * request.hash_block, request.input_tokens - 1)
        tokens += request.input_tokens
    return hit / tokens


def measure_eviction(name: str, requests: Sequence[Request], shares: Sequence[float]) -> list[Figure]:
    """Every policy at every size, with and without admission, and with and without prefixes."""
    blocks = len({identity for request in requests for identity in request.hash_ids or ()})
    figures = []
    for share in shares:
        capacity = max(int(share * blocks), 1) * (BLOCK_BYTES + HEADER_BYTES)
        lru: float | None = None
        for eviction, min_uses, as_prefix in product(POLICIES, (1, 2), (False, True)):
            value = hit_share(requests, capacity, eviction, min_uses, as_prefix) if requests else None
            lru = value if lru is None else lru
            label = eviction + ("+tinylfu" if min_uses > 1 else "") + ("+prefix" if as_prefix else "")
            note = f"{max(int(share * blocks), 1):,} of {blocks:,} blocks"
            figures.append(Figure(f"evict/{name}/{share:g}/{label}", value, "fraction", lru, note=note))
    return figures


# -- windows ----------------------------------------------------------------------------------------------------------


class Replayed(Counter[str]):
    """Tokens of prompts, and loaded ones; bytes stored by kind."""


def replay(layout: ModelLayout, requests: Sequence[Request], where: str, block: int) -> Replayed:
    """Run the requests one after the other; the tier has room for everything and takes no time."""
    longest = max(request.input_tokens + request.output_tokens for request in requests) + 1
    geometry = replace(plan_geometry("kvtide", layout, block), one_table=False)
    tokens = longest + 2 * STEP
    memory = int(1.1 * tokens * layout.bytes_per_token) // geometry.page_bytes * geometry.page_bytes
    manager = HybridMemoryManager(
        geometry, memory, max_requests=1, max_model_len=longest, max_step_tokens=STEP, max_steps_in_flight=1
    )
    offload = Offload((TierSpec("tier", 1 << 50, 1e15),), store_policy_of(where), preemption="swap")
    rows = OffloadedRows(manager, offload, full_layout=layout, tensor=1, ranks=1, seconds_per_token=1.0)
    seen = Replayed()
    for number, request in enumerate(requests):
        output = output_tokens(number, request)
        admission = rows.admit(str(number), prompt_tokens(number, request), image_tokens=0, turn_ends=request.turn_ends)
        row = admission.row
        while not rows.ready(row):
            rows.transfers.now += 1.0
            rows.poll()
        seen["loaded"] += int(manager.committed[row])
        seen["prompt"] += request.input_tokens
        end = request.input_tokens + max(len(output) - 1, 0)
        while (done := int(manager.committed[row])) < end:
            edge = request.input_tokens if done < request.input_tokens else end
            count = min(edge - done, STEP)
            manager.reserve([row], [count])
            new = output[done - request.input_tokens :][:count] if edge == end and done >= request.input_tokens else []
            rows.commit([row], [count], np.asarray(new, dtype=np.int64))
            rows.transfers.now += 1.0
            rows.poll()
        rows.release(row)
        manager.reset_cache()
        rows.transfers.now += 1.0
        rows.poll()
    (tier,) = rows.usage().tiers
    for kind, size in tier.bytes_by_kind.items():
        seen[kind] = size
    return seen


def measure_windows(
    name: str, requests: Sequence[Request], models: Sequence[str], places: Sequence[str]
) -> list[Figure]:
    """Hits of every choice, and what it writes."""
    figures = []
    for model in models:
        layout = ModelLayout.preset(model)
        full = [layer for layer in layout.layers if isinstance(layer.spec, FullAttention)]
        whole = replace(layout, layers=tuple(layer for layer in full if type(layer.spec) is FullAttention))
        ceiling = _share(replay(whole, requests, "none", BLOCK[name])) if requests else None
        for label in places:
            seen = replay(layout, requests, WHERE[label], BLOCK[name]) if requests else None
            figures.append(
                Figure(f"window/{name}/{model}/{label}", None if seen is None else _share(seen), "fraction", ceiling)
            )
            sizes = (
                [None, None] if seen is None else [seen[kind] / 2**30 for kind in ("sliding_window", "full_attention")]
            )
            figures.append(Figure(f"stored/{name}/{model}/{label}", sizes[0], "GiB", sizes[1]))
    return figures


def _share(seen: Replayed) -> float:
    return seen["loaded"] / seen["prompt"]


@click.command()
@common_options
def main(quick: bool, smoke: bool, json_file: Path | None) -> None:
    """Compare policies of offload on the Mooncake and the coding-agent trace."""
    figures: list[Figure] = []
    for name in TRACES:
        requests = load(name, 20 if smoke else None)
        if not requests:
            click.echo(f"no {TRACES[name]} in {SHARED}: set KVTIDE_SHARED to the folder that holds traces/", err=True)
        small = quick or smoke
        figures += measure_eviction(name, requests[: 1000 if quick else None], SHARES[1:3] if small else SHARES)
        some = requests[: 12 if smoke else 20 if quick else 250]
        places = ("none", "prompt_ends", "default") if smoke else tuple(WHERE)
        figures += measure_windows(name, some, MODELS[:1] if small else MODELS, places)
    publish("offload policies (evict: peer is LRU; window: peer is the ceiling)", figures, json_file)


if __name__ == "__main__":
    main()
