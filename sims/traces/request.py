"""One request of a serving trace, and a trace as a stream of them.

Readers make `Request`s, the simulator consumes them, and nothing else passes between the two. A `Trace` is iterated
once; while that goes on its `bytes_read` and `num_skipped` say how far it has come, at the cost of an attribute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Request(NamedTuple):
    """What a trace says about one request.

    `arrival_s` counts from the start of the trace and is never negative. `input_tokens` is the whole prompt;
    `image_tokens` of it are image tokens. `hash_ids` name the prompt's prefix blocks of `hash_block` tokens (equal
    id: equal prefix up to there), the last one may be partial or left out; None when the trace says nothing of
    prefixes. `reasoning_tokens` of the output are thinking tokens; None when the trace does not say. `request_id` is
    the line number in traces that do not name their requests. `turn_ends` are lengths at which the prompts of others
    may part from this one, such as the end of a system prompt. `prompt_ids` and `output_ids` are token ids, as long as
    the tokens counted; None when the trace has none.
    """

    request_id: str
    arrival_s: float
    input_tokens: int
    output_tokens: int
    image_tokens: int = 0
    reasoning_tokens: int | None = None
    hash_ids: tuple[int, ...] | None = None
    hash_block: int = 0
    turn_ends: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] | None = None


@dataclass
class Progress:
    """How far a reader has come: readers write it, progress bars and reports read it through `Trace`."""

    bytes_read: int = 0
    num_skipped: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """A named stream of requests: iterate it once, in file order, which is not always the order of arrival.

    `num_bytes` is the size of its files, 0 if generated. Iterating raises `TraceError` at the first row that cannot
    be read, and at the end of a trace that has no requests at all.
    """

    name: str
    format: str
    requests: Iterator[Request]
    num_bytes: int = 0
    progress: Progress = field(default_factory=Progress)

    def __iter__(self) -> Iterator[Request]:
        return self.requests

    @property
    def bytes_read(self) -> int:
        """Bytes consumed so far of `num_bytes` (compressed ones in a compressed file)."""
        return self.progress.bytes_read

    @property
    def num_skipped(self) -> int:
        """Rows left out so far because they are no served request (failures, samples without a prompt)."""
        return self.progress.num_skipped

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions that a report should repeat; complete once iteration has begun."""
        return tuple(self.progress.notes)
