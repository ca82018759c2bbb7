"""Whether one request fits: decided by running it through a manager of its own with an empty pool.

The answer is exact by construction, because it is the manager that gives it: the same growth, the same pages, the same
order. It holds for an empty pool. Where pages hold several blocks, a pool full of cached blocks can scatter a request
over a few pages more; a lone request that this answer accepted and that still meets `Exhausted` gets through after
`preempt`, `reset_cache` and `resume`.
"""

from __future__ import annotations

from kvtide.kvcache import Exhausted

from .manager import HybridMemoryManager


def fits(
    manager: HybridMemoryManager,
    prompt_tokens: int,
    output_tokens: int = 1,
    *,
    image_tokens: int = 0,
    step_tokens: int | None = None,
    kv_from_activations: bool = False,
) -> bool:
    """Whether a request of this size runs to its end in the manager's memory when it is alone there.

    The prompt is computed in chunks of `step_tokens` (by default `max_step_tokens`), then one token a step. The last
    output token is sampled and never stored; with none, the prompt is. False also for requests longer than
    `max_model_len`.
    """
    total = prompt_tokens + max(output_tokens, 1) - 1
    if prompt_tokens < 1 or output_tokens < 0 or max(total, image_tokens) > manager.max_model_len:
        return False
    trial = HybridMemoryManager(
        manager.geometry,
        manager.pool.num_pages * manager.geometry.page_bytes,
        max_requests=1,
        max_model_len=manager.max_model_len,
        max_step_tokens=manager.max_step_tokens,
        max_steps_in_flight=1,
        lookahead=manager.lookahead,
        prefix_caching=manager.prefix_caching,
    )
    row = trial.admit("trial", [0] * prompt_tokens, image_tokens=image_tokens).row
    chunk = step_tokens or manager.max_step_tokens
    try:
        while (done := int(trial.committed[row])) < total:
            count = min(chunk, prompt_tokens - done) if done < prompt_tokens else 1
            trial.reserve([row], [count], kv_from_activations=kv_from_activations)
            trial.commit([row], [count], [0] * max(done + count - max(prompt_tokens, done), 0))
    except Exhausted:
        return False
    return True
