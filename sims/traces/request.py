"""One request of a serving trace, and a trace as a stream of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Request(NamedTuple):
    """What a trace says about one request.

    `input_tokens` is the whole prompt; `image_tokens` of it are image tokens. `hash_ids` name the prompt's prefix
    blocks of `hash_block` tokens (equal id: equal prefix up to there); None when the trace says nothing of prefixes.
    `reasoning_tokens` of the output are thinking tokens; None when the trace does not say.
    """

    request_id: str
    arrival_s: float
    input_tokens: int
    output_tokens: int
    image_tokens: int = 0
    reasoning_tokens: int | None = None
    hash_ids: tuple[int, ...] | None = None
    hash_block: int = 0


@dataclass(frozen=True)
class Trace:
    """A named stream of requests: iterate it once, in file order. `num_bytes` is the size of its files, 0 if generated.

    Iterating raises `TraceError` at the first row that cannot be read.
    """

    name: str
    format: str
    requests: Iterator[Request]
    num_bytes: int = 0

    def __iter__(self) -> Iterator[Request]:
        return self.requests
