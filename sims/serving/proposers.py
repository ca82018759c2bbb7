"""Drafts that are looked up instead of computed: n-grams of a request's own text, and suffixes of it and of others'.

    ngram    ... a b c d e | x y z ...... a b c d e |            the longest n-gram that ends here stood there first:
                             └──────── drafts ─────────►         what followed it then
    suffix   what followed the last m tokens, for every m up to the tree's depth, wherever they stood before, goes
             along the most frequent next token; how far it goes depends on m, how sure it is on the counts

Both do what vLLM's proposers do: `ngram` is prompt lookup, `suffix` is suffix decoding (Oliaro et al., 2024), as far as
published. A proposer sees a request's prompt and every token that is sampled, and never what comes after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from kvtide.kvcache import ConfigError
from kvtide.kvcache.specs import Int64Array

_END = -1  # between texts: equal to no token
_COMPACT = 1 << 20  # dead tokens from which on memory is given back


class Proposer(ABC):
    """Drafts for many requests by name: `start` with the prompt, `extend` by what was sampled, `propose`, `end`."""

    @abstractmethod
    def start(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        """A request begins; at most `max_tokens` will be sampled for it."""

    @abstractmethod
    def extend(self, name: str, tokens: Sequence[int]) -> None:
        """Tokens were sampled."""

    @abstractmethod
    def propose(self, name: str, most: int) -> list[int]:
        """At most `most` drafts of the tokens that come next."""

    @abstractmethod
    def end(self, name: str) -> None:
        """The request has ended."""


class _Grams:
    """A text, and where each n-gram of it ended first."""

    def __init__(self, sizes: range) -> None:
        self.tokens: list[int] = []
        self._first: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}

    def extend(self, tokens: Sequence[int]) -> None:
        begin = len(self.tokens)
        self.tokens += tokens
        for size, first in self._first.items():
            for end in range(max(begin + 1, size), len(self.tokens) + 1):
                first.setdefault(tuple(self.tokens[end - size : end]), end)

    def followers(self, most: int) -> list[int]:
        length = len(self.tokens)
        for size, first in reversed(self._first.items()):
            end = first.get(tuple(self.tokens[length - size :]), length) if size <= length else length
            if end < length:
                return self.tokens[end : end + most]
        return []


class NgramProposer(Proposer):
    """Prompt lookup: the longest n-gram of `min_n` to `max_n` tokens; where it stood first counts."""

    def __init__(self, min_n: int, max_n: int) -> None:
        if not 1 <= min_n <= max_n:
            raise ConfigError(f"n-grams of {min_n} to {max_n} tokens are none; allowed are at least 1, min at most max")
        self._sizes = range(min_n, max_n + 1)
        self._texts: dict[str, _Grams] = {}

    def start(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        text = self._texts[name] = _Grams(self._sizes)
        text.extend(prompt)

    def extend(self, name: str, tokens: Sequence[int]) -> None:
        self._texts[name].extend(tokens)

    def propose(self, name: str, most: int) -> list[int]:
        return self._texts[name].followers(most)

    def end(self, name: str) -> None:
        del self._texts[name]


class _Occurrences:
    """Texts in one array, with an end mark before each, and where each token stands. The oldest texts can be dropped.

    A suffix tree answers the same questions; of the few places where a token stands, those where those before it match
    too are found as fast, and what is dropped costs nothing.
    """

    def __init__(self) -> None:
        self._tokens: Int64Array = np.full(1024, _END, dtype=np.int64)
        self._places: dict[int, array[int]] = {}
        self._length = 0
        self._alive = 0

    def open(self, capacity: int) -> int:
        """Room for a text of so many tokens; its address."""
        start = self._length + 1
        self._length = start + capacity
        if self._length + 1 > len(self._tokens):
            more = np.full(max(self._length + 1, len(self._tokens)), _END, dtype=np.int64)
            self._tokens = np.concatenate([self._tokens, more])
        return start

    def write(self, start: int, tokens: Sequence[int]) -> None:
        self._tokens[start : start + len(tokens)] = tokens
        for at, token in enumerate(tokens, start):
            places = self._places.get(token)
            if places is None:
                places = self._places[token] = array("q")
            places.append(at)

    def drop_before(self, address: int) -> int:
        """Forget the texts before an address; by how much the addresses of the others go down."""
        self._alive = address
        if address < _COMPACT or address < self._length // 2:
            return 0
        shift = address - 1
        self._tokens = self._tokens[shift:].copy()
        self._length -= shift
        self._alive -= shift
        for token, places in list(self._places.items()):
            kept = np.array(places, dtype=np.int64)
            kept = kept[kept > shift] - shift
            if len(kept):
                self._places[token] = array("q", kept.tolist())
            else:
                del self._places[token]
        return shift

    def matches(self, pattern: Sequence[int]) -> Iterator[tuple[int, int, Int64Array]]:
        """Where the last tokens of a pattern stand: (least, most, last places) of every set of places that differs."""
        places = self._places.get(pattern[-1])
        if places is None:
            return
        found = np.array(places, dtype=np.int64)
        if self._alive:
            found = found[found >= self._alive]
        least = 1
        for size in range(2, len(pattern) + 1):
            longer = found[self._tokens[found - size + 1] == pattern[-size]]
            if len(longer) < len(found):
                if len(found):
                    yield least, size - 1, found
                found, least = longer, size
            if not len(found):
                return
        yield least, len(pattern), found

    def path(self, places: Int64Array, most: int, min_prob: float) -> tuple[float, list[int]]:
        """Along the most frequent next tokens: the sum of their probabilities, and the tokens."""
        prob, score, drafts = 1.0, 0.0, list[int]()
        while len(drafts) < most:
            following = self._tokens[places + 1]
            counts = Counter(following[following != _END].tolist())
            if not counts:
                break
            token, count = counts.most_common(1)[0]
            prob *= count / len(places)
            if prob < min_prob:
                break
            drafts.append(token)
            score += prob
            places = places[following == token] + 1
        return score, drafts


class _Own:
    """A request: its own text, the last tokens of it, and how many were sampled."""

    def __init__(self, capacity: int) -> None:
        self.text = _Occurrences()
        self.address = self.text.open(capacity)
        self.tokens: list[int] = []
        self.num_sampled = 0


class SuffixProposer(Proposer):
    """Suffix decoding over a request's own text and the outputs of the last `max_cached_requests` requests.

    `max_depth` bounds match and drafts together. A match of m tokens gives at most `m * max_factor` drafts, as long as
    their probability stays at `min_prob`. The better of the two texts drafts; a tie is the request's own.
    """

    def __init__(self, max_depth: int, max_cached_requests: int, max_factor: float, min_prob: float) -> None:
        self._depth, self._cached = max_depth, max_cached_requests
        self._factor, self._min_prob = max_factor, min_prob
        self._active: dict[str, _Own] = {}
        self._outputs = _Occurrences()
        self._addresses: OrderedDict[str, int] = OrderedDict()  # where the outputs that are remembered begin

    def start(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        own = self._active[name] = _Own(len(prompt) + max_tokens)
        own.text.write(own.address, prompt)
        own.tokens = list(prompt[-self._depth :])
        own.address += len(prompt)
        if not self._cached:
            return
        self._addresses[name] = self._outputs.open(max_tokens)
        if len(self._addresses) > self._cached:
            self._addresses.popitem(last=False)
            shift = self._outputs.drop_before(next(iter(self._addresses.values())))
            for other in self._addresses if shift else ():
                self._addresses[other] -= shift

    def extend(self, name: str, tokens: Sequence[int]) -> None:
        own = self._active[name]
        own.text.write(own.address, tokens)
        own.address += len(tokens)
        own.tokens = [*own.tokens, *tokens][-self._depth :]
        if name in self._addresses:  # long ones are forgotten while they run
            self._outputs.write(self._addresses[name] + own.num_sampled, tokens)
        own.num_sampled += len(tokens)

    def propose(self, name: str, most: int) -> list[int]:
        own = self._active[name]
        own_score, own_drafts = self._best(own.text, own.tokens, most)
        score, drafts = self._best(self._outputs, own.tokens, most)
        return own_drafts if own_score >= score else drafts

    def end(self, name: str) -> None:
        del self._active[name]

    def _best(self, text: _Occurrences, pattern: Sequence[int], most: int) -> tuple[float, list[int]]:
        best: tuple[float, list[int]] = (0.0, [])
        for least, longest, places in text.matches(pattern):
            # Longer matches at the same places may draft more, until the tree's depth is in the way.
            allowed = max(min(int(m * self._factor + 1e-6), self._depth - m) for m in range(least, longest + 1))
            found = text.path(places, min(allowed, most), self._min_prob)
            if found[0] >= best[0]:
                best = found
        return best
