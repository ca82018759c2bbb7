"""`--speculative-config`: what vLLM accepts there, what it means for the scheduler, and how many drafts come true.

A config is vLLM's JSON (or the same keys in YAML). Acceptance is what the simulator must be told, since there is no
model to ask: a rate, a rate per position, or a mean acceptance length. Positions are marginal rates, as vLLM's metrics
and its `synthetic_acceptance_rates` are: position i is accepted only if all before it were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import yaml

from kvtide.kvcache import ConfigError
from kvtide.kvcache.documents import read_yaml, shown

from .job import Step
from .settings import MAX_DRAFTS

# Drafters that are part of, or run like, the target: they write KV for the tokens they draft.
_TRAINED = ("mtp", "eagle", "eagle3", "draft_model", "dflash", "dspark")
_LOOKUP = ("ngram", "suffix")
METHODS = _TRAINED + _LOOKUP
_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "draft_tensor_parallel_size",
    "max_model_len",
    "parallel_drafting",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
    "num_speculative_tokens_per_batch_size",
    "rejection_sample_method",
    "draft_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "disable_by_batch_size",
)


@dataclass(frozen=True)
class SpeculativeConfig:
    """A checked config. `schedule` is vLLM's `num_speculative_tokens_per_batch_size`: (first, last, drafts) ranges."""

    method: str
    num_speculative_tokens: int
    model: str | None = None
    draft_tensor_parallel_size: int | None = None
    parallel_drafting: bool = False
    schedule: tuple[tuple[int, int, int], ...] = ()
    acceptance: Acceptance | None = None
    notes: tuple[str, ...] = ()
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    suffix_max_tree_depth: int = 24
    suffix_max_cached_requests: int = 10_000
    suffix_max_spec_factor: float = 1.0
    suffix_min_token_prob: float = 0.1

    @property
    def is_lookup(self) -> bool:
        """Whether drafts are looked up in texts, so that a trace with token ids says how many come true."""
        return self.method in _LOOKUP

    @property
    def lookahead_tokens(self) -> int:
        """KV slots that the drafter needs beyond the scheduled tokens."""
        if self.is_lookup:
            return 0
        return self.num_speculative_tokens + (self.method == "dflash")

    @property
    def draft_slots(self) -> int:
        """Slots of the step's budget that the drafter needs per request."""
        drafts = self.num_speculative_tokens
        if self.method == "draft_model":
            return drafts if self.parallel_drafting else 1
        if self.method == "dflash":
            return drafts
        if self.method == "dspark" or (self.method == "eagle3" and self.parallel_drafting):
            return drafts - 1
        return 0

    @property
    def allows_async_scheduling(self) -> bool:
        """vLLM refuses n-gram and suffix drafts there: they need the sampled tokens on the host."""
        return not self.is_lookup

    def dense_schedule(self, max_num_seqs: int) -> tuple[int, ...]:
        """Drafts by batch size, index 0 unused; empty without a schedule. Gaps and the tail carry the last value on."""
        if not self.schedule:
            return ()
        dense = [0] * (max_num_seqs + 1)
        for first, _, drafts in self.schedule:
            for batch in range(first, max_num_seqs + 1):
                dense[batch] = min(drafts, self.num_speculative_tokens)
        return tuple(dense)


class Acceptance:
    """How many drafts of a step come true. `rates[i]` is the share of all drafts accepted at position i."""

    def __init__(self, rates: Sequence[float]) -> None:
        values = list(rates)
        if any(isinstance(rate, bool) or not isinstance(rate, int | float) for rate in values):
            raise ConfigError(f"acceptance rates {values!r} must be numbers")
        if any(not 0 <= rate <= 1 for rate in values) or any(b > a for a, b in pairwise(values)):
            raise ConfigError(f"acceptance rates {values} must lie between 0 and 1 and never rise with the position")
        self.rates = tuple(float(rate) for rate in values)

    @classmethod
    def from_rate(cls, rate: float, num_drafts: int) -> Acceptance:
        """Every draft is accepted with this probability if those before it were."""
        return cls([rate ** (i + 1) for i in range(num_drafts)])

    @classmethod
    def from_length(cls, length: float, num_drafts: int) -> Acceptance:
        """A mean acceptance length, the target's own token included: whole positions first, then the fraction."""
        if not 1 <= length <= num_drafts + 1:
            raise ConfigError(f"acceptance length {length} must be from 1 to {num_drafts + 1}")
        return cls([min(max(length - 1 - i, 0.0), 1.0) for i in range(num_drafts)])

    @property
    def mean_length(self) -> float:
        """Mean tokens per step of a request whose drafts are all scheduled."""
        return 1 + sum(self.rates)

    def accept(self, step: Step, random: np.random.Generator) -> list[int]:
        """Accepted drafts of each part of a step, drawn independently."""
        if not self.rates:
            return [0] * step.num_requests
        draws = random.random(step.num_requests).tolist()
        return [
            sum(draw < rate for rate in self.rates[: part.num_drafts]) if part.samples and not part.is_padding else 0
            for part, draw in zip(step.parts, draws, strict=True)
        ]


def read_speculative_config(
    source: str | Mapping[str, Any], *, n_predict: int = 0, tensor_parallel_size: int = 1
) -> SpeculativeConfig:
    """Parse and check `source`: inline JSON or YAML in braces, a file of it, or a mapping.

    `n_predict` is how many MTP layers the model has. `ConfigError` for an unknown key, a value that vLLM refuses, or a
    method that cannot be inferred.
    """
    if isinstance(source, str) and source.lstrip().startswith("{"):
        try:
            source = yaml.safe_load(source)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise ConfigError(f"speculative config {shown(source)} is neither JSON nor YAML") from None
    raw = dict(read_yaml(source, "speculative.yaml").data)
    if "tensor_parallel_size" in raw:
        raise ConfigError("speculative config: tensor_parallel_size is not a key of it; use draft_tensor_parallel_size")
    if unknown := [key for key in raw if key not in _KEYS]:
        raise ConfigError(f"speculative config has no key {shown(unknown[0])}; allowed: {', '.join(_KEYS)}")
    notes: list[str] = []
    method = _method(raw, notes)
    if raw.pop("disable_by_batch_size", None) is not None:
        notes.append("disable_by_batch_size is gone from vLLM; num_speculative_tokens_per_batch_size replaces it")
    draft_tp = raw.get("draft_tensor_parallel_size", tensor_parallel_size)
    if isinstance(draft_tp, bool) or draft_tp not in (1, tensor_parallel_size):
        raise ConfigError(
            f"speculative config: draft_tensor_parallel_size {shown(draft_tp)} must be 1 or {tensor_parallel_size}"
        )
    _check_lookup(raw, method)
    drafts = _num_drafts(raw, method, n_predict, notes)
    return SpeculativeConfig(
        method,
        drafts,
        model=raw.get("model"),
        draft_tensor_parallel_size=raw.get("draft_tensor_parallel_size"),
        parallel_drafting=bool(raw.get("parallel_drafting", False)),
        schedule=_schedule(raw.get("num_speculative_tokens_per_batch_size")),
        acceptance=_acceptance(raw, drafts),
        notes=tuple(notes),
        prompt_lookup_min=raw.get("prompt_lookup_min") or raw.get("prompt_lookup_max") or 5,
        prompt_lookup_max=raw.get("prompt_lookup_max") or raw.get("prompt_lookup_min") or 5,
        suffix_max_tree_depth=raw.get("suffix_decoding_max_tree_depth", 24),
        suffix_max_cached_requests=raw.get("suffix_decoding_max_cached_requests", 10_000),
        suffix_max_spec_factor=raw.get("suffix_decoding_max_spec_factor", 1.0),
        suffix_min_token_prob=raw.get("suffix_decoding_min_token_prob", 0.1),
    )


def _method(raw: Mapping[str, Any], notes: list[str]) -> str:
    """The method given, or inferred from the drafter's name as vLLM does."""
    method, model = raw.get("method"), raw.get("model")
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"speculative config: model is {shown(model)}, but must be a name or a path")
    if isinstance(method, str) and method.endswith("_mtp"):
        notes.append(f"method {method} is an old name of mtp")
        method = "mtp"
    if method is None:
        if model is None:
            raise ConfigError("speculative config needs a method or a model")
        name = model.lower()
        if name in ("ngram", "[ngram]"):
            return "ngram"
        if "gemma-4" in name and "assistant" in name:
            raise ConfigError(f"speculative config: {model} is an assistant checkpoint; it needs method: mtp")
        for word, found in (("eagle3", "eagle3"), ("eagle-", "eagle"), ("dflash", "dflash"), ("dspark", "dspark")):
            if word in name:
                return found
        return "draft_model"
    if method not in METHODS:
        raise ConfigError(f"speculative config: method is {shown(method)}, but must be one of {', '.join(METHODS)}")
    if model is None and method not in ("mtp", "dspark", *_LOOKUP):
        raise ConfigError(f"speculative config: method {method} needs a model")
    return str(method)


def _num_drafts(raw: Mapping[str, Any], method: str, n_predict: int, notes: list[str]) -> int:
    default = n_predict if method == "mtp" else raw.get("suffix_decoding_max_tree_depth", 24)
    drafts = raw.get("num_speculative_tokens", default if method in ("mtp", "suffix") else None)
    if isinstance(drafts, bool) or not isinstance(drafts, int) or not 1 <= drafts <= MAX_DRAFTS:
        raise ConfigError(
            f"speculative config: num_speculative_tokens is {shown(drafts)}, but must be from 1 to {MAX_DRAFTS}"
        )
    if method == "mtp" and n_predict:
        if drafts > n_predict and drafts % n_predict:
            raise ConfigError(
                f"speculative config: num_speculative_tokens {drafts} must be divisible by the model's "
                f"{n_predict} MTP layers"
            )
        if n_predict == 1 and drafts > 1:
            notes.append(f"{drafts} drafts come from one MTP layer run {drafts} times; later ones are accepted less")
    return drafts


def _check_lookup(raw: dict[str, Any], method: str) -> None:
    if method == "ngram":
        given = [n for n in (raw.get("prompt_lookup_min"), raw.get("prompt_lookup_max")) if n is not None] or [5]
        if any(type(n) is not int or n < 1 for n in given) or given[0] > given[-1]:
            raise ConfigError(
                f"speculative config: prompt_lookup_min and prompt_lookup_max are {shown(given)}, but must be whole "
                "numbers of at least 1, min at most max"
            )
    for key, least, most in (
        ("suffix_decoding_max_tree_depth", 1, float("inf")),
        ("suffix_decoding_max_cached_requests", 0, float("inf")),
        ("suffix_decoding_max_spec_factor", 0, float("inf")),
        ("suffix_decoding_min_token_prob", 0, 1),
    ):
        value = raw.get(key, least)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ConfigError(
                f"speculative config: {key} is {shown(value)}, but must be at least {least} and {most} at most"
            )
    for key, allowed in (
        ("rejection_sample_method", ("standard", "synthetic", "block", "fly")),
        ("draft_sample_method", ("greedy", "probabilistic")),
    ):
        if raw.get(key, allowed[0]) not in allowed:
            raise ConfigError(
                f"speculative config: {key} is {shown(raw[key])}, but must be one of {', '.join(allowed)}"
            )


def _schedule(raw: Any) -> tuple[tuple[int, int, int], ...]:
    if raw is None:
        return ()
    wrong = ConfigError(
        f"speculative config: num_speculative_tokens_per_batch_size is {shown(raw)}, but must be ranges "
        "[first, last, drafts] that begin at 1, rise and do not overlap, with drafts of at least 0"
    )
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        raise wrong
    ranges: list[tuple[int, int, int]] = []
    for item in raw:
        if not isinstance(item, Sequence) or len(item) != 3 or any(type(n) is not int for n in item):
            raise wrong
        first, last, drafts = item
        after = ranges[-1][1] + 1 if ranges else 1
        if first < after or (not ranges and first != 1) or last < first or drafts < 0:
            raise wrong
        ranges.append((first, last, drafts))
    return tuple(ranges)


def _acceptance(raw: Mapping[str, Any], drafts: int) -> Acceptance | None:
    rates, length = raw.get("synthetic_acceptance_rates"), raw.get("synthetic_acceptance_length")
    if rates is not None and length is not None:
        raise ConfigError(
            "speculative config: give synthetic_acceptance_rates or synthetic_acceptance_length, not both"
        )
    if rates is not None:
        if not isinstance(rates, Sequence) or isinstance(rates, str) or len(rates) != drafts:
            raise ConfigError(
                f"speculative config: synthetic_acceptance_rates is {shown(rates)}, but must be {drafts} rates"
            )
        return Acceptance(rates)
    if length is not None:
        if isinstance(length, bool) or not isinstance(length, int | float):
            raise ConfigError(
                f"speculative config: synthetic_acceptance_length is {shown(length)}, but must be a number"
            )
        return Acceptance.from_length(length, drafts)
    return None
