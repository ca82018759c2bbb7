"""What is worth storing at which event, and what is worth loading.

A block of full attention (or an MLA latent) serves every longer prompt that shares it, so it is stored as soon as it is
whole. A window's blocks complete a hit only at the one length whose last window they are, so they are stored where a
prefix is likely to end and nowhere else; for a window of 1,024 tokens in a prompt of 32,768 that is a 32nd of them. A
recurrent state is worth storing wherever the engine took a checkpoint of it. Loading is worth it where it is faster
than computing the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvtide.kvcache import ConfigError
from kvtide.kvcache.specs import Kind


class Event(StrEnum):
    """What happens to a block."""

    COMMITTED = "committed"  # it got its key; of windows, at the end of a prefix; of states, a checkpoint was taken
    OUT_OF_WINDOW = "out_of_window"  # no query of its row can reach it again
    EVICTED = "evicted"  # the device needs its memory, and it could still complete a hit
    PREEMPTED = "preempted"  # its row was preempted
    FINISHED = "finished"  # its row's request has ended


class Action(StrEnum):
    """What is done with it."""

    DROP = "drop"  # the device forgets it as soon as nothing holds it
    KEEP = "keep"  # the device keeps it cached until its memory is wanted
    STORE = "store"  # the same, and it is written to the store


WHOLE_KINDS = (Kind.FULL_ATTENTION, Kind.MLA)
STATE_KINDS = (Kind.RECURRENT_STATE,)
WINDOW_KINDS = (Kind.SLIDING_WINDOW, Kind.SINK_WINDOW, Kind.CHUNKED_LOCAL, Kind.SLIDING_WINDOW_MLA)

# Cross attention is in no row: text does not determine it, so it has no key.
DEFAULT_RULES: Mapping[tuple[Event, Kind], Action] = {
    **dict.fromkeys([(event, kind) for event in Event for kind in (*WHOLE_KINDS, *WINDOW_KINDS)], Action.STORE),
    **dict.fromkeys([(Event.OUT_OF_WINDOW, kind) for kind in (*WHOLE_KINDS, *WINDOW_KINDS)], Action.KEEP),
    **dict.fromkeys([(Event.EVICTED, kind) for kind in (*WHOLE_KINDS, *WINDOW_KINDS, *STATE_KINDS)], Action.DROP),
    (Event.COMMITTED, Kind.RECURRENT_STATE): Action.STORE,
}


@dataclass(frozen=True, kw_only=True)
class StorePolicy:
    """When blocks are stored. `rules` change `DEFAULT_RULES`, event and layer kind by event and layer kind.

    Where windows are stored when they are committed: at the end of the prompt (`prompt_ends`), at the ends of turns
    that the engine names (`turn_ends`), where a prompt parts from what was there before (`junctions`: the next such
    prompt parts there too), and every so many tokens (`every_tokens`, 0: nowhere else). With recurrent states only
    where a checkpoint is, since no hit ends anywhere else.

    Whole blocks of a prompt are stored as they are computed; those of generated text at least `generated_tokens` at a
    time, so that a decode step seldom has anything to do; what is left when the row leaves is stored then.
    """

    rules: Mapping[tuple[Event, Kind], Action] = field(default_factory=dict)
    prompt_ends: bool = True
    turn_ends: bool = True
    junctions: bool = True
    every_tokens: int = 0
    generated_tokens: int = 256

    def __post_init__(self) -> None:
        for name, value, least in (
            ("every_tokens", self.every_tokens, 0),
            ("generated_tokens", self.generated_tokens, 1),
        ):
            if value < least:
                raise ConfigError(f"{name} {value} must be at least {least}")
        for (event, kind), action in self.rules.items():
            if (event, kind) not in DEFAULT_RULES or (event is Event.OUT_OF_WINDOW and kind in WHOLE_KINDS):
                raise ConfigError(f"a {kind} block has no event {event} that a rule could be for")
            if event is Event.EVICTED and action is Action.KEEP:
                raise ConfigError(f"a {kind} block that is evicted cannot be kept; allowed are drop and store")
            if event is Event.COMMITTED and action is Action.DROP:
                raise ConfigError(f"a {kind} block cannot be dropped when it is committed: its row needs it")

    def action(self, event: Event, kind: Kind) -> Action:
        """What to do with a block of a kind."""
        return self.rules.get((event, kind)) or DEFAULT_RULES.get((event, kind), Action.KEEP)

    def stores(self, event: Event, kind: Kind) -> bool:
        """Whether blocks of a kind are stored at an event."""
        return self.action(event, kind) is Action.STORE


@dataclass(frozen=True, kw_only=True)
class LoadPolicy:
    """When tokens are loaded instead of computed: `seconds_per_token` of prefill against the store's speed.

    It decides at admission whether a load is started, and at preemption whether a request is swapped out or left to be
    recomputed. The defaults take 20,000 tokens a second, a GB/s and 5 ms: measure your own. Less than `min_tokens` are
    never loaded. A load that gets no staging memory for `patience_s` is given up.
    """

    min_tokens: int = 64
    seconds_per_token: float = 5e-5
    bytes_per_second: float = 1e9
    latency_s: float = 0.005
    patience_s: float = 1.0

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
