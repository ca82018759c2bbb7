"""Replay a trace through the real manager: waste integrated over time, at a fixed number of running requests.

Requests are admitted in trace order as soon as one has finished, so the clock is the step: every running request
computes one token, or a chunk of its prompt while the step's budget lasts. Prefixes are shared as the trace says. The
pool is as large as `concurrency` requests of the trace's longest would need, so that nothing waits for memory and
policies differ only in what they hold. Bytes are sampled inside every `SAMPLE`-th step, while its tokens are in flight,
and averaged; a page counts while a request holds a block of it. Cached blocks in such pages that no request holds
(`idle_cached`) are reported beside the waste, not in it: they are a cache, and the page's own group can take them at
once. Other groups cannot before the page empties, so geometries with many blocks a page keep more of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvtide.hma import Admission, HybridMemoryManager, MemoryByCause
from kvtide.hma.accounting import account_active_groups
from kvtide.kvcache import ConfigError
from kvtide.kvcache.geometry import PageGeometry
from kvtide.kvcache.specs import Int64Array

from .capacity import in_flight_pages, request_pages
from .tokens import output_tokens, prompt_tokens
from .traces import Request
from .waste import waste_fraction

# Steps between two samples: hundreds of samples a trace, and accounting costs less than the steps themselves.
SAMPLE = 16
# Memory beyond what the requests need when each is alone in its pages: shared pages can be scattered.
ROOM = 1.25


@dataclass(frozen=True)
class ReplayWaste:
    """Mean bytes held over the replay, by layer kind and cause, and how much of the prompts came from the cache."""

    policy: str
    steps: int
    requests: int
    total_tokens: int
    by_kind: dict[str, dict[str, float]]
    prompt_tokens: int
    cached_tokens: int

    @property
    def mean_bytes(self) -> dict[str, float]:
        """Mean bytes by cause, over all kinds."""
        return {cause: sum(kind[cause] for kind in self.by_kind.values()) for cause in MemoryByCause._fields}

    @property
    def held_bytes(self) -> float:
        """Mean bytes of active pages, without the cached blocks in them that no request holds."""
        return held_bytes(self.mean_bytes)

    @property
    def waste_fraction(self) -> float:
        """1 − needed / held, of the time averages."""
        return waste_fraction(self.mean_bytes["needed"], self.held_bytes)

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that came from the cache."""
        return self.cached_tokens / self.prompt_tokens


@dataclass
class _Running:
    """A running request: its row, its prompt's length, and the tokens that it will have stored at its end."""

    row: int
    prompt: int
    total: int
    output: Int64Array


def held_bytes(by_cause: Mapping[str, float]) -> float:
    """All causes but `idle_cached`, which the page's own group could take at once and other groups could not."""
    return sum(by_cause.values()) - by_cause["idle_cached"]


def replay(
    geometry: PageGeometry,
    requests: Sequence[Request],
    *,
    concurrency: int,
    step_tokens: int = 8192,
    kv_from_activations: bool = False,
    on_request: Callable[[], None] = lambda: None,
) -> ReplayWaste:
    """Run the requests to their ends under one policy.

    `step_tokens` is the most tokens of one step, over all requests. With `kv_from_activations` tokens that are out of
    reach by the end of their step take no memory. `on_request` is called as each request finishes. Requests without a
    prompt are left out; `ConfigError` when none is left.
    """
    if concurrency < 1:
        raise ConfigError(f"concurrency {concurrency} must be at least 1")
    requests = [request for request in requests if request.input_tokens > 0]
    if not requests:
        raise ConfigError("the trace has no request with a prompt to replay")
    concurrency = min(concurrency, len(requests))
    manager = _manager(geometry, requests, concurrency, step_tokens)
    waiting = enumerate(requests)
    running: list[_Running] = []
    samples = {group.name: np.zeros(len(MemoryByCause._fields)) for group in manager.groups}
    steps = num_samples = cached = 0
    while True:
        while len(running) < concurrency and (entry := next(waiting, None)):
            number, request = entry
            admission = _admit(manager, number, request)
            cached += admission.num_cached_tokens
            running.append(_running(number, request, admission.row, manager.num_tokens(admission.row)))
        if not running:
            break
        rows, counts, tokens = _reserve(manager, running, step_tokens, kv_from_activations)
        if steps % SAMPLE == 0:
            for name, held in account_active_groups(manager).items():
                samples[name] += np.array(held, dtype=np.float64)
            num_samples += 1
        manager.commit(rows, counts, tokens)
        steps += 1
        unfinished = []
        for item in running:
            if manager.committed[item.row] < item.total:
                unfinished.append(item)
            else:
                manager.release(item.row)
                on_request()
        running = unfinished
    by_kind: dict[str, dict[str, float]] = {}
    for group in manager.groups:
        kind = by_kind.setdefault(group.fmt.group.spec.kind, dict.fromkeys(MemoryByCause._fields, 0.0))
        for cause, total in zip(MemoryByCause._fields, samples[group.name].tolist(), strict=True):
            kind[cause] += total / num_samples
    return ReplayWaste(
        geometry.policy,
        steps,
        len(requests),
        sum(request.input_tokens + request.output_tokens for request in requests),
        by_kind,
        prompt_tokens=sum(request.input_tokens for request in requests),
        cached_tokens=cached,
    )


def _reserve(
    manager: HybridMemoryManager, running: list[_Running], step_tokens: int, kv_from_activations: bool
) -> tuple[list[int], list[int], Int64Array]:
    """One token for every request that decodes, and chunks of prompts, oldest first, while the budget lasts.

    Returns rows, tokens of each, and the generated tokens among them.
    """
    budget = step_tokens
    rows, counts, tokens = [], [], []
    for item in running:
        done = int(manager.committed[item.row])
        wanted = min(max(item.prompt - done, 1), budget)
        if not wanted:
            continue
        budget -= wanted
        rows.append(item.row)
        counts.append(wanted)
        if done >= item.prompt:
            tokens.append(item.output[done - item.prompt])
    manager.reserve(rows, counts, kv_from_activations=kv_from_activations)
    return rows, counts, np.array(tokens, dtype=np.int64)


def _manager(
    geometry: PageGeometry, requests: Sequence[Request], concurrency: int, step_tokens: int
) -> HybridMemoryManager:
    if geometry.layout.has_cross_attention and any(fmt.keeps_all for fmt in geometry.formats):
        raise ConfigError(f"replay cannot keep images of {geometry.layout.name} in all layers; leave uniform out")
    longest = max(request.input_tokens + request.output_tokens for request in requests)
    images = max(request.image_tokens for request in requests)
    each = request_pages(geometry, longest, images)
    burst = in_flight_pages(geometry, step_tokens, longest, images, concurrency)
    pages = math.ceil(ROOM * (concurrency * sum(each) + sum(burst))) + concurrency * len(geometry.formats)
    # Groups that share one table take blocks together. Here each takes them on pages of its own, one per slice of the
    # shared block: more pages, the same bytes.
    geometry = replace(geometry, one_table=False)
    return HybridMemoryManager(
        geometry,
        pages * geometry.page_bytes,
        max_requests=concurrency,
        max_model_len=longest,
        max_step_tokens=step_tokens,
        max_steps_in_flight=1,
    )


def _admit(manager: HybridMemoryManager, number: int, request: Request) -> Admission:
    in_text = not manager.geometry.layout.has_cross_attention
    text = request.input_tokens - (0 if in_text else request.image_tokens)
    return manager.admit(
        str(number), prompt_tokens(number, request)[: max(text, 1)], image_tokens=0 if in_text else request.image_tokens
    )


def _running(number: int, request: Request, row: int, known: int) -> _Running:
    # The last output token is sampled and never stored.
    output = max(request.output_tokens - 1, 0)
    return _Running(row, known, known + output, output_tokens(number, request))
