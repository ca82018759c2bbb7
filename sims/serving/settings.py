"""The engine's settings as vLLM names them, with vLLM's checks, and the rule sets of its versions.

Frozen data: the scheduler and the engine loop read it, nothing writes it. `EngineSettings` is what the flags have come
to once defaults are filled in (`defaults.py`); `Rules` is what a version of vLLM does differently from another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtide.kvcache import ConfigError

POLICIES = ("fcfs", "priority")
MAX_TOKENS = 2**31
MAX_DRAFTS = 128


@dataclass(frozen=True)
class Rules:
    """What differs between versions of vLLM.

    `draft_slots_per_request`: slots that a drafter needs beyond the scheduled tokens are taken from the budget for each
    scheduled request; before, they were taken once for `max_num_seqs`. `charge_every_step_in_flight`: the admission
    gate charges a window the tokens of all steps in flight; before, those of one. `async_pipeline`: asynchronous
    scheduling keeps a step more in flight also where pipeline stages keep several. `watermark`: there is one.
    `budget_with_drafts`: thinking budgets hold with speculation too; before, they were accepted and ignored. 0.20.2
    also returned freed blocks without a key behind cached ones, where here, as in 0.33, they are taken first. The
    rules of 0.33 are tested against
    a running 0.32; those of 0.20.2 are taken from published notes and were never run.
    """

    version: str
    draft_slots_per_request: bool
    charge_every_step_in_flight: bool
    async_pipeline: bool
    watermark: bool
    budget_with_drafts: bool


RULES = {
    "0.20.2": Rules(
        "0.20.2",
        draft_slots_per_request=False,
        charge_every_step_in_flight=False,
        async_pipeline=False,
        watermark=False,
        budget_with_drafts=False,
    ),
    "0.33": Rules(
        "0.33",
        draft_slots_per_request=True,
        charge_every_step_in_flight=True,
        async_pipeline=True,
        watermark=True,
        budget_with_drafts=True,
    ),
}
DEFAULT_VERSION = "0.33"


def rules_of(version: str) -> Rules:
    """The rule set of a vLLM version; `ConfigError` lists those there are."""
    if version not in RULES:
        raise ConfigError(f"vLLM version {version!r} has no rule set; allowed: {', '.join(RULES)}")
    return RULES[version]


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one engine; `ConfigError` for values that vLLM refuses.

    `max_num_seqs` requests run at most, `max_num_batched_tokens` are computed a step at most. `max_model_len` is in
    tokens, prompt and output. `long_prefill_token_threshold` caps the tokens of one request in one step (0: no cap).
    `scheduler_reserve_full_isl` admits a request only when blocks for all its present tokens can be had, and
    `watermark` keeps a share of the pool free at admission. `async_scheduling` keeps one step more in flight, and
    `pipeline_parallel_size` as many as there are stages.
    `num_speculative_tokens` are drafted per step, `lookahead_tokens` slots and `draft_slots` budget are kept for the
    drafter; `draft_schedule[n]` replaces the number of drafts in a batch of n.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int = 16
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    async_scheduling: bool = True
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    num_speculative_tokens: int = 0
    lookahead_tokens: int = 0
    draft_slots: int = 0
    draft_schedule: tuple[int, ...] = ()
    pipeline_parallel_size: int = 1
    rules: Rules = field(default_factory=lambda: RULES[DEFAULT_VERSION])

    def __post_init__(self) -> None:
        for name, low in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 1),
            ("block_size", 1),
            ("long_prefill_token_threshold", 0),
            ("num_speculative_tokens", 0),
            ("lookahead_tokens", 0),
            ("draft_slots", 0),
            ("pipeline_parallel_size", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_TOKENS:
                raise ConfigError(f"{name} is {value!r}, but must be a whole number from {low} to {MAX_TOKENS}")
        if self.scheduling_policy not in POLICIES:
            raise ConfigError(
                f"scheduling_policy {self.scheduling_policy!r} is not known; allowed: {', '.join(POLICIES)}"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark}, but must be at least 0 and below 1")
        if self.watermark and not self.rules.watermark:
            raise ConfigError(f"watermark is {self.watermark}, but vLLM {self.rules.version} has none; it must be 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least max_num_seqs "
                f"{self.max_num_seqs}, so that every running request can decode"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill max_num_batched_tokens {self.max_num_batched_tokens} must be at least "
                f"max_model_len {self.max_model_len}, or longer prompts could never run"
            )
        if self.long_prefill_token_threshold > self.max_model_len:
            raise ConfigError(
                f"long_prefill_token_threshold {self.long_prefill_token_threshold} is above max_model_len "
                f"{self.max_model_len}"
            )
        if self.step_budget < 1 or self.max_num_batched_tokens <= self.draft_slots:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} leaves no token to schedule beside the "
                f"drafter's slots ({self.draft_slots} a request)"
            )

    @property
    def step_budget(self) -> int:
        """Tokens that one step may schedule."""
        if self.rules.draft_slots_per_request:
            return self.max_num_batched_tokens
        return self.max_num_batched_tokens - self.draft_slots * self.max_num_seqs

    @property
    def steps_in_flight(self) -> int:
        """Steps that are scheduled before the oldest one's tokens are known."""
        return self.pipeline_parallel_size + self.async_scheduling

    @property
    def charged_in_flight(self) -> int:
        """Tokens in flight that the admission gate charges to every request's windows."""
        steps = self.steps_in_flight if self.rules.charge_every_step_in_flight else 1
        return steps * self.max_num_batched_tokens

    def drafts_after(self, batch: int) -> int:
        """Draft tokens that a request gets for its next step when this step runs `batch` requests."""
        if self.draft_schedule:
            return self.draft_schedule[min(batch, len(self.draft_schedule) - 1)]
        return self.num_speculative_tokens
