"""What speculative decoding gains: drafts counted once per step for the whole batch, and the rates derived from them.

The engine calls `DraftAccounting.record` after verification; an exporter takes `counts()` whenever it likes and
subtracts an earlier one for an interval. Definitions are those of vLLM's metrics, so the figures can be compared: a
*draft* is one request in one step that had draft tokens to verify; d is the number of its draft tokens (without those
that a grammar refused before verification), a the number of them that were accepted; the token that the target model
adds behind them is in neither. With the sums over all drafts:

    draft acceptance rate        sum(a) / sum(d)
    mean acceptance length       1 + sum(a) / drafts      tokens committed per draft, the target's own included
    acceptance at position i     #(a > i) / drafts        over all drafts, also those shorter than i; never rises with i
    conditional acceptance at i  #(a > i) / #(a > i - 1)  of the drafts accepted up to i, the share accepted there too
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import ConfigError


@dataclass(frozen=True)
class DraftCounts:
    """Counts up to one moment, or between two of them: `later - earlier`. Rates without a draft are None."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_position: tuple[int, ...]  # [max_draft_tokens]: drafts with a > i

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens / draft tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_drafts else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens committed per draft, in [1, max_draft_tokens + 1]."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_per_position(self) -> tuple[float | None, ...]:
        """For each position the share of all drafts that were accepted there, [max_draft_tokens]."""
        return tuple(_ratio(count, self.num_drafts) for count in self.num_accepted_tokens_per_position)

    @property
    def conditional_acceptance_per_position(self) -> tuple[float | None, ...]:
        """For each position the share of the drafts accepted up to there, [max_draft_tokens]; None if there are none.

        A draft that ends before a position is in the denominator there, as it is in the unconditional rate.
        """
        counts = self.num_accepted_tokens_per_position
        return tuple(_ratio(count, reached) for count, reached in zip(counts, (self.num_drafts, *counts), strict=False))

    def __sub__(self, earlier: DraftCounts) -> DraftCounts:
        """Counts since `earlier`, an earlier result of the same accounting; `ConfigError` if it cannot be one."""
        mine, theirs = self.num_accepted_tokens_per_position, earlier.num_accepted_tokens_per_position
        if len(mine) != len(theirs):
            raise ConfigError(f"counts over {len(theirs)} draft positions cannot be subtracted from {len(mine)}")
        difference = DraftCounts(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            tuple(a - b for a, b in zip(mine, theirs, strict=True)),
        )
        if min(difference.num_drafts, difference.num_draft_tokens, *difference.num_accepted_tokens_per_position) < 0:
            raise ConfigError(
                f"counts of {earlier.num_drafts} drafts cannot be subtracted from counts of {self.num_drafts}: "
                "an interval is the later counts minus the earlier ones"
            )
        return difference


class DraftAccounting:
    """Running counts of drafts with at most `max_draft_tokens` tokens each.

    The state is a histogram: how many drafts had exactly a accepted tokens, for a in 0..max_draft_tokens.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        if isinstance(max_draft_tokens, bool) or not isinstance(max_draft_tokens, int) or max_draft_tokens < 1:
            raise ConfigError(f"max_draft_tokens is {max_draft_tokens!r}, and must be an integer of at least 1")
        self.max_draft_tokens = max_draft_tokens
        self._drafts_by_accepted = np.zeros(max_draft_tokens + 1, dtype=np.int64)
        self._num_draft_tokens = 0

    def record(self, drafted: npt.ArrayLike, accepted: npt.ArrayLike) -> None:
        """Count one step: integers [requests], draft tokens verified and of them accepted; 0 drafted is no draft.

        `ConfigError` for other shapes or types, for a negative value, more drafted than `max_draft_tokens` or more
        accepted than drafted; nothing is counted then.
        """
        d, a = _integers("drafted", drafted), _integers("accepted", accepted)
        if d.shape != a.shape:
            raise ConfigError(f"drafted has {d.size} requests and accepted has {a.size}, and they must be the same")
        for wrong in np.flatnonzero((a < 0) | (a > d) | (d > self.max_draft_tokens))[:1]:
            raise ConfigError(
                f"request {wrong} of the batch has {a[wrong]} accepted of {d[wrong]} draft tokens, "
                f"and 0 <= accepted <= drafted <= {self.max_draft_tokens} must hold"
            )
        self._drafts_by_accepted += np.bincount(a[d > 0], minlength=self.max_draft_tokens + 1)
        self._num_draft_tokens += int(d.sum())

    def counts(self) -> DraftCounts:
        """Everything recorded so far."""
        at_least = self._drafts_by_accepted[::-1].cumsum()[::-1]  # [a]: drafts with at least a accepted
        per_position = at_least[1:]
        return DraftCounts(
            int(at_least[0]), self._num_draft_tokens, int(per_position.sum()), tuple(per_position.tolist())
        )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _integers(name: str, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    array = np.asarray(values)
    # An empty list has no integer type of its own.
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(
            f"{name} is an array of {array.dtype} with {array.ndim} axes, and must be integers [requests]"
        )
    return array.astype(np.int64)
