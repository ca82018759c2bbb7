"""A complete continuous-batching engine on kvtide's parts, to read from top to bottom: the tutorial for engine authors.

    add ─► waiting ─► admit, resume ─► running ─► one step for all of them ─► finished
              ▲                           │       reserve, forward pass, verify drafts, commit
              └───────── preempt ◄────────┘

It has what a serving engine has: requests that come and go at any step, prefix hits, prefill in chunks beside decoding
rows, n-gram drafts, thinking budgets, preemption when memory runs out, offload to a store that outlives the process.
The model is any that `kvtide.connectors.transformers` serves. `python examples/tiny_engine.py` shows it at work.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtide.connectors.config import make_store
from kvtide.connectors.transformers import PagedModel, model_layout, weights_digest
from kvtide.hma import HybridMemoryManager, ThinkingBudget, ThinkingMarkers
from kvtide.kvcache import Exhausted
from kvtide.kvcache.arena import Arena
from kvtide.kvcache.solver import solve_geometry
from kvtide.offload.manager import OffloadManager
from kvtide.offload.policies import LoadPolicy
from kvtide.offload.transfers import Transfers

MARKERS = ThinkingMarkers(start=(1,), natural_end=(2,), forced_end=(2,))


@dataclass(eq=False)
class Request:
    """A prompt, and how many tokens may follow it; `thinking_budget` of them in a section of reasoning."""

    name: str
    prompt: list[int]
    max_new_tokens: int
    thinking_budget: int | None = None
    output: list[int] = field(default_factory=list)
    row: int = -1
    cached_tokens: int = -1

    @property
    def tokens(self) -> list[int]:
        """All tokens that are known."""
        return self.prompt + self.output


class TinyEngine:
    """One model on one device; greedy. `store` is a kvtide store that KV is offloaded to, opened and closed by others.

    A step computes up to `max_step_tokens` tokens; `num_drafts` are tried per row and decode step.
    """

    def __init__(
        self,
        model: Any,
        *,
        memory: int | str,
        store: Any = None,
        num_drafts: int = 3,
        max_requests: int = 8,
        max_step_tokens: int = 64,
        max_model_len: int = 2048,
        eos: int | None = None,
    ) -> None:
        geometry = solve_geometry(model_layout(model), 16)
        self.manager = HybridMemoryManager(
            geometry, memory, max_requests=max_requests, max_step_tokens=max_step_tokens, max_model_len=max_model_len
        )
        arena = Arena(geometry, self.manager.pool.num_pages, device=str(model.device))
        self.model = PagedModel(model, self.manager, arena)
        # Who is asked to admit, resume, commit, preempt and release: the manager, or the offload manager before it.
        self.requests: HybridMemoryManager | OffloadManager = self.manager
        self.offload: OffloadManager | None = None
        if store is not None:
            self.offload = self.requests = OffloadManager(
                self.manager,
                Transfers(arena.memory, store),
                model=weights_digest(model),
                load_policy=LoadPolicy(min_tokens=32, seconds_per_token=1e-3),
            )
        self.thinking = ThinkingBudget(MARKERS, max_requests)
        # A recurrent state that has seen a rejected draft cannot go back, and this forward pass keeps only the last.
        self.num_drafts = 0 if self.model.has_states else num_drafts
        self.eos = eos
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.is_full = False
        self.counts: Counter[str] = Counter()

    def run(self, requests: Iterable[Request]) -> None:
        """Serve requests until all are finished."""
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.step()

    def close(self) -> None:
        """Finish what is being stored, and give the model its own attention back."""
        if self.offload is not None:
            while self.offload.stats().held_bytes:
                self.offload.poll()
            self.offload.close()
        self.model.close()

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Admit what there are rows for, then compute: a chunk of each prompt, a token and drafts of each other row."""
        if self.offload is not None:
            self.offload.poll()
        self.admit()
        ready = [r for r in self.running if self.offload is None or self.offload.ready(r.row)]
        batch, counts, drafts = self.schedule(ready)
        while batch:
            try:
                plan = self.manager.reserve([r.row for r in batch], counts, num_drafts=[len(d) for d in drafts])
                break
            except Exhausted:
                victim = self.running[-1]  # the youngest has the least to lose
                if len(self.running) == 1:
                    raise
                self.preempt(victim)
                if victim in batch:
                    at = batch.index(victim)
                    del batch[at], counts[at], drafts[at]
        if not batch:
            time.sleep(0.001)  # all that runs is being loaded
            return
        # Tokens of the step, row after row, and the places whose logits say what comes next: none inside a prompt.
        ids: list[int] = []
        places: list[int] = []
        for request, start, count, guesses in zip(batch, plan.start.tolist(), counts, drafts, strict=True):
            ids += (request.tokens + guesses)[start : start + count]
            if start + count >= len(request.tokens):
                places += range(len(ids) - 1 - len(guesses), len(ids))
        logits = self.model.run(plan, ids, places or [len(ids) - 1])
        self.counts["steps"] += 1
        self.counts["computed"] += len(ids)
        self.finish_step(batch, counts, drafts, logits.argmax(dim=-1).tolist())

    def admit(self) -> None:
        """Give waiting requests a row. After a preemption nobody comes in before somebody has finished."""
        if self.is_full and self.running:
            return
        self.is_full = False
        while self.waiting and (self.waiting[0].row >= 0 or len(self.running) < self.manager.max_requests):
            request = self.waiting[0]
            try:
                if request.row >= 0:
                    admission = self.requests.resume(request.row)
                else:
                    admission = self.requests.admit(request.name, request.prompt)
            except Exhausted:  # no row is free: preempted requests keep theirs
                return
            self.running.append(self.waiting.popleft())
            request.row = admission.row
            self.thinking.admit(request.row, request.tokens, request.thinking_budget)

    def schedule(self, ready: Sequence[Request]) -> tuple[list[Request], list[int], list[list[int]]]:
        """Who computes how many tokens, drafts included, and which drafts; decoding rows come first."""
        batch, counts, drafts = [], [], []
        budget = self.manager.max_step_tokens
        for request in sorted(ready, key=lambda r: len(r.tokens) - self.done(r) > 1):
            left = len(request.tokens) - self.done(request)
            if request.cached_tokens < 0:
                request.cached_tokens = self.done(request)
            guesses: list[int] = []
            if left == 1 and request.output:
                room = min(self.num_drafts, request.max_new_tokens - len(request.output) - 1, budget - 1)
                guesses = ngram_drafts(request.tokens, max(room, 0))
            elif self.model.has_states and self.done(request) < self.boundary(request):
                left = self.boundary(request) - self.done(request)  # a chunk ends where the state is kept
            count = min(left + len(guesses), budget)
            if not count:
                break
            batch.append(request)
            counts.append(count)
            drafts.append(guesses)
            budget -= count
        return batch, counts, drafts

    def finish_step(self, batch: list[Request], counts: list[int], drafts: list[list[int]], sampled: list[int]) -> None:
        """Verify drafts against what the model sampled, cut at thinking budgets, commit, let finished requests go."""
        width = max(len(guesses) for guesses in drafts)
        padded = np.array([guesses + [-1] * (width - len(guesses)) for guesses in drafts], np.int64)
        rows = [request.row for request in batch]
        forced = self.thinking.force(rows, padded.reshape(len(batch), width)).tokens.tolist()
        accepted: list[int] = []
        news: list[list[int]] = []
        unseen: list[int] = []
        for at, (request, count, guesses) in enumerate(zip(batch, counts, drafts, strict=True)):
            start, new = self.done(request), []
            if start + count >= len(request.tokens):
                samples, sampled = sampled[: len(guesses) + 1], sampled[len(guesses) + 1 :]
                new = verify(guesses, samples, forced[at], self.eos)
            # The last new token is not computed yet: it is the next step's.
            accepted.append(count - len(guesses) + max(len(new) - 1, 0))
            request.output += new
            news.append(new)
            unseen += request.tokens[self.manager.num_tokens(request.row) : start + accepted[-1]]
        self.requests.commit(rows, accepted, unseen)
        width = max(len(new) for new in news)
        kept = np.array([new + [-1] * (width - len(new)) for new in news], np.int64).reshape(len(batch), width)
        self.thinking.commit(rows, kept, [len(new) for new in news])
        for request in batch:
            if self.model.has_states and self.done(request) == self.boundary(request) > 0:
                self.model.copy(self.requests.checkpoint(request.row))
            if len(request.output) >= request.max_new_tokens or (request.output and request.output[-1] == self.eos):
                self.leave(request)

    def preempt(self, request: Request) -> None:
        """Take a request's memory; it waits, first in line, and goes on later from what is still cached or stored."""
        self.requests.preempt(request.row)
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.is_full = True
        self.counts["preempted"] += 1

    def leave(self, request: Request) -> None:
        """A request has ended: its blocks become cached prefixes."""
        self.thinking.release(request.row)
        self.requests.release(request.row)
        self.running.remove(request)
        self.is_full = False

    def done(self, request: Request) -> int:
        """Tokens that are computed and committed."""
        return int(self.manager.committed[request.row])

    def boundary(self, request: Request) -> int:
        """Where a recurrent model keeps its state for later prompts: at the prompt's last whole block."""
        return (len(request.prompt) - 1) // self.manager.base * self.manager.base


def verify(guesses: Sequence[int], samples: Sequence[int], forced: Sequence[int], eos: int | None) -> list[int]:
    """What a row's step adds: the drafts that are what the model says (or the budget forces), and one token more."""
    new: list[int] = []
    for place, sample in enumerate(samples):
        new.append(sample if forced[place] < 0 else forced[place])
        if new[-1] == eos or place == len(guesses) or new[-1] != guesses[place]:
            break
    return new


def ngram_drafts(tokens: Sequence[int], most: int, length: int = 2) -> list[int]:
    """What followed when the last `length` tokens were there before."""
    tail = list(tokens[-length:])
    for start in range(len(tokens) - length - 1, -1, -1):
        if list(tokens[start : start + length]) == tail:
            return list(tokens[start + length : start + length + most])
    return []


def main() -> None:
    """Serve eight requests in little memory, then some of them again in a new engine on the same store."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    torch.set_num_threads(1)  # enough for a model this small
    config = Gemma3TextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )
    model = Gemma3ForCausalLM(config).eval()
    rng = np.random.default_rng(0)
    system = rng.integers(3, 256, 100).tolist()  # all prompts begin with it
    prompts = [system + rng.integers(3, 256, 20 + 10 * n).tolist() for n in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        for title in ("first engine", "second engine, same store"):
            store = make_store("LMDBConnector", {"path": folder})
            engine = TinyEngine(model, memory="1MiB", store=store)
            requests = [Request(f"request {n}", prompt, 60) for n, prompt in enumerate(prompts)]
            requests.append(Request("thinker", [*system, 1], 60, thinking_budget=16))
            began = time.perf_counter()
            engine.run(requests)
            print(f"{title}: {len(requests)} requests in {time.perf_counter() - began:.1f} s")
            for request in requests:
                print(
                    f"  {request.name}: {len(request.prompt)} prompt tokens, {request.cached_tokens} of them cached, "
                    f"{len(request.output)} generated, ending in {request.output[-5:]}"
                )
            drafts = engine.manager.drafts.counts()
            print(
                f"  {engine.counts['steps']} steps, {engine.counts['computed']} tokens computed, "
                f"{engine.counts['preempted']} preemptions; {drafts.num_accepted_tokens} of "
                f"{drafts.num_draft_tokens} draft tokens accepted"
            )
            thought = requests[-1].output.index(2) if 2 in requests[-1].output else None
            print(f"  the thinker was cut after {thought} tokens of reasoning; its budget was 16")
            if engine.offload is not None:
                print(f"  hits in tokens: {engine.offload.stats().tokens}")
            engine.close()
            store.close()


if __name__ == "__main__":
    main()
