"""What is worth storing, and what is worth loading.

Full-attention blocks and latents are stored when they become whole: any later prompt may share them. A window's blocks
complete a hit only at the length whose last window they are, so they are stored only where a prefix is likely to end:
at the end of the prompt and where the request ends or is preempted. Loading is worth it where it is faster than
computing the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.kvcache import ConfigError


@dataclass(frozen=True, kw_only=True)
class StorePolicy:
    """When blocks are stored.

    `at_prompt_end`, `at_end`: the places at which windows are stored; preemption counts as an end. With `while_running`
    False, full-attention blocks are stored at those places too, not as they become whole.
    """

    while_running: bool = True
    at_prompt_end: bool = True
    at_end: bool = True


@dataclass(frozen=True, kw_only=True)
class LoadPolicy:
    """When a load is started instead of computing: `seconds_per_token` of prefill against the store's speed.

    The defaults take 20,000 tokens a second, a GB/s and 5 ms: measure your own. `min_tokens` in any case.
    """

    min_tokens: int = 64
    seconds_per_token: float = 5e-5
    bytes_per_second: float = 1e9
    latency_s: float = 0.005

    def __post_init__(self) -> None:
        for name, value in (
            ("seconds_per_token", self.seconds_per_token),
            ("bytes_per_second", self.bytes_per_second),
        ):
            if not value > 0:
                raise ConfigError(f"{name} {value} must be more than 0")

    def is_worth(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether loading `num_bytes` beats computing `num_tokens`."""
        if num_tokens < self.min_tokens:
            return False
        return self.latency_s + num_bytes / self.bytes_per_second < num_tokens * self.seconds_per_token
