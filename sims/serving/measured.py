"""Acceptance measured, not assumed: real proposers draft from a trace's token ids, and its real continuation judges.

A draft is accepted while it equals the token that the trace has there, as greedy sampling would accept it. A request
has as many drafts as its proposer finds, so also none.
"""

from __future__ import annotations

import numpy as np

from kvtide.kvcache import ConfigError

from .job import Job, Step
from .proposers import NgramProposer, Proposer, SuffixProposer
from .speculation import SpeculativeConfig


def proposer_of(config: SpeculativeConfig) -> Proposer:
    """The proposer that a config describes; `ConfigError` for drafts that a model computes."""
    if config.method == "ngram":
        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "suffix":
        return SuffixProposer(
            config.suffix_max_tree_depth,
            config.suffix_max_cached_requests,
            config.suffix_max_spec_factor,
            config.suffix_min_token_prob,
        )
    raise ConfigError(f"drafts of method {config.method} come from a model; how many come true cannot be measured here")


class MeasuredAcceptance:
    """Stands in for `Acceptance`. `max_model_len` bounds what is drafted."""

    def __init__(self, config: SpeculativeConfig, max_model_len: int) -> None:
        self._proposer = proposer_of(config)
        # Suffix decoding keeps one position for the token that is sampled after the drafts.
        self._last = max_model_len - (config.method == "suffix")
        self._drafts: dict[str, list[int]] = {}
        self._known: dict[str, int] = {}

    def accept(self, step: Step, random: np.random.Generator) -> list[int]:
        """Drafts of each part of a step that equal the trace's tokens, from the first on."""
        accepted = []
        for part in step.parts:
            right = 0
            if part.samples and not part.is_padding and part.num_drafts and not part.job.finished:
                real = part.job.output[part.job.num_output :]
                for draft, token in zip(self._drafts[part.job.request_id][: part.num_drafts], real, strict=False):
                    if draft != token:
                        break
                    right += 1
            accepted.append(right)
        return accepted

    def drafts_for(self, job: Job, most: int) -> int:
        """Draft for a job's next step, now that its last one's tokens are known; how many drafts there are."""
        name = job.request_id
        if name not in self._known:
            self._proposer.start(name, job.prompt.tolist(), len(job.output))
            self._known[name] = 0
        new = job.output[self._known[name] : job.num_output].tolist()
        self._proposer.extend(name, new)
        self._known[name] += len(new)
        if job.finished:
            self._proposer.end(name)
            del self._known[name]
            self._drafts.pop(name, None)
            return 0
        room = min(most, self._last - job.num_tokens)
        drafts = self._drafts[name] = self._proposer.propose(name, room) if room > 0 else []
        return len(drafts)
