"""What vLLM's scheduler side and its workers tell each other, once a step. Everything here pickles.

    scheduler ──► worker    look-ups, loads, saves, requests that are over, prefixes that have served
    worker ──► scheduler    answers to look-ups, requests whose load failed, counts

The store is the workers': the scheduler asks them. So a store that one process owns will do, however many processes
vLLM runs, and each worker answers for its own layers and heads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

# One block: the chain hash of the tokens up to its end, and its number in vLLM's pool.
Block = tuple[bytes, int]


@dataclass(frozen=True)
class LookUp:
    """How long a hit between two lengths is there? `chains` are the joined chain hashes, by tokens a block."""

    ticket: int
    req_id: str
    start: int
    limit: int
    chains: dict[int, bytes]


@dataclass(frozen=True)
class Load:
    """Fill these blocks, one list a group."""

    req_id: str
    blocks: list[list[Block]]


@dataclass(frozen=True)
class Save:
    """Store these blocks, one list a group. `last`: vLLM keeps them until the worker says that they are copied."""

    req_id: str
    blocks: list[list[Block]]
    owner: str = ""
    last: bool = False


@dataclass(frozen=True)
class Served:
    """A request ran on the prefix of `length` tokens. `chains` as in a look-up; windows were stored at `ends`."""

    length: int
    ends: list[int]
    chains: dict[int, bytes]


@dataclass
class ToWorker:
    """One step's work. `idle`: the step computes nothing, so there is time to wait a moment."""

    look_ups: list[LookUp] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    idle: bool = False


@dataclass
class Answer:
    """Of `count` workers, the shortest `end` and `run`; `agree`: they all said the same end."""

    end: int
    run: int
    count: int = 1
    agree: bool = True

    def merge(self, other: Answer) -> Answer:
        """Both answers as one."""
        return Answer(
            min(self.end, other.end),
            min(self.run, other.run),
            self.count + other.count,
            self.agree and other.agree and self.end == other.end,
        )


@dataclass
class FromWorker:
    """What one or several workers have to say."""

    answers: dict[int, Answer] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    def merge(self, other: FromWorker) -> FromWorker:
        """Both workers' news as one."""
        answers = dict(self.answers)
        for ticket, answer in other.answers.items():
            answers[ticket] = answers[ticket].merge(answer) if ticket in answers else answer
        return FromWorker(answers, self.failed | other.failed, self.counts + other.counts)

    def __bool__(self) -> bool:
        return bool(self.answers or self.failed or self.counts)
