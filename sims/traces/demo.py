"""The bundled trace: a seeded, plausible half hour of an LLM server, the same on every platform.

It mixes three kinds of session: chats (shared system prompts, some with images), questions about shared long
documents, and coding agents (a long shared prompt, many steps, reasoning). A prompt holds all that was said before it
in its session, and `hash_ids` name its full blocks of 64 tokens, so prefix sharing within and between sessions is real.
All is integer arithmetic on the raw output of PCG64, which NumPy promises not to change.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import accumulate, count
from typing import NamedTuple

import numpy as np

from .request import Request

DEFAULT_REQUESTS = 2_000
BLOCK = 64

_MAX_PROMPT = 120_000  # fits a model of 128k
_IMAGE_TOKENS = 256
_ANSWER_MS_PER_TOKEN = 20  # how long a session waits for an answer before its next pause
_MEAN_SESSION_GAP_MS = 4_000  # gives a little more than one request per second


class _Kind(NamedTuple):
    """A kind of session. Pairs are the least and the largest of a heavy-tailed draw; lengths are in tokens."""

    name: str
    weight: int
    shared_prompts: int
    shared_blocks: tuple[int, int]
    turns: tuple[int, int]
    said: tuple[int, int]
    answer: tuple[int, int]
    pause_ms: tuple[int, int]
    one_in_has_images: int = 0
    reasons: bool = False


_KINDS = (
    _Kind("chat", 70, 4, (8, 32), (1, 16), (24, 4_096), (64, 2_048), (6_000, 120_000), one_in_has_images=4),
    _Kind("document", 18, 40, (64, 1_024), (1, 6), (16, 512), (96, 1_024), (10_000, 120_000)),
    _Kind("agent", 12, 2, (128, 256), (6, 48), (96, 8_192), (64, 2_048), (200, 20_000), reasons=True),
)
_WEIGHTS = tuple(accumulate(kind.weight for kind in _KINDS))


def generate_demo(seed: int) -> Iterator[Request]:
    """Yield requests in order of arrival, without end."""
    draw = _Draw(seed)
    waiting: list[tuple[int, int, Request]] = []
    order = count()
    start_ms = 0
    for number in count():
        for at_ms, request in draw.session(number, start_ms):
            heapq.heappush(waiting, (at_ms, next(order), request))
        start_ms += draw.below(2 * _MEAN_SESSION_GAP_MS)
        while waiting and waiting[0][0] < start_ms:  # no later session comes before these
            yield heapq.heappop(waiting)[2]


class _Draw:
    """Draws sessions; owns the random numbers, the shared prompts and the names of blocks."""

    def __init__(self, seed: int) -> None:
        self._bits = _raw_bits(seed)
        self._fresh_block = count()
        self._shared: dict[tuple[str, int], list[int]] = {}

    def below(self, bound: int) -> int:
        """Draw a whole number from 0 to `bound - 1`."""
        return (next(self._bits) >> 11) * bound >> 53

    def heavy(self, least: int, most: int) -> int:
        """Draw from a discrete Pareto-like law: every doubling is half as likely, up to `most`."""
        scale = least
        while 2 * scale <= most and self.below(2):
            scale *= 2
        return min(scale + self.below(scale), most)

    def session(self, number: int, at_ms: int) -> Iterator[tuple[int, Request]]:
        """Yield the turns of one session that starts at `at_ms`, each with the time of its arrival."""
        ticket = self.below(_WEIGHTS[-1])
        kind = next(kind for kind, bound in zip(_KINDS, _WEIGHTS, strict=True) if ticket < bound)
        blocks = list(self._shared_prompt(kind))
        prompt = len(blocks) * BLOCK
        images = 0
        if kind.one_in_has_images and self.below(kind.one_in_has_images) == 0:
            images = _IMAGE_TOKENS * (1 + self.below(3))
            prompt += images
        for turn in range(self.heavy(*kind.turns)):
            prompt += self.heavy(*kind.said)
            if prompt > _MAX_PROMPT:
                return
            while len(blocks) < prompt // BLOCK:
                blocks.append(next(self._fresh_block))
            answer = self.heavy(*kind.answer)
            reasoning = answer * self.below(80) // 100 if kind.reasons else 0
            yield (
                at_ms,
                Request(
                    request_id=f"{kind.name}-{number}/{turn}",
                    arrival_s=at_ms / 1000,
                    input_tokens=prompt,
                    output_tokens=answer,
                    image_tokens=images,
                    reasoning_tokens=reasoning,
                    hash_ids=tuple(blocks),
                    hash_block=BLOCK,
                ),
            )
            prompt += answer
            at_ms += answer * _ANSWER_MS_PER_TOKEN + self.heavy(*kind.pause_ms)

    def _shared_prompt(self, kind: _Kind) -> list[int]:
        # The smaller of two draws: the first prompts are popular, the last ones rare.
        which = min(self.below(kind.shared_prompts), self.below(kind.shared_prompts))
        if (kind.name, which) not in self._shared:
            length = self.heavy(*kind.shared_blocks)
            self._shared[kind.name, which] = [next(self._fresh_block) for _ in range(length)]
        return self._shared[kind.name, which]


def _raw_bits(seed: int) -> Iterator[int]:
    generator = np.random.PCG64(seed)
    while True:
        yield from generator.random_raw(4096).tolist()
