"""One request's story in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..serving.recording import Event, Story


def told(story: Story) -> Iterator[tuple[str, str]]:
    """When and what, line by line; times are seconds of virtual time."""
    for event in story.events:
        when = f"{event.time_s:,.3f} s"
        if event.until_s is not None and event.until_s > event.time_s:
            when = f"{event.time_s:,.3f} – {event.until_s:,.3f} s"
        yield when, _SENTENCES[event.kind](event)
    if story.dropped:
        yield "", f"... and {story.dropped:,} events more that were not kept"


def as_json(story: Story) -> dict[str, Any]:
    """The story as it stands in a JSON report."""
    return {
        "request": story.name,
        "input_tokens": story.input_tokens,
        "output_tokens": story.output_tokens,
        "dropped_events": story.dropped,
        "events": [
            {"time_s": event.time_s, "until_s": event.until_s, "kind": event.kind, **event.details}
            for event in story.events
        ],
    }


def _queued(event: Event) -> str:
    ahead, running = event.details["ahead"], event.details["running"]
    return f"arrives: {_many(ahead, 'request')} waiting before it, {running:,} running"


def _waits(event: Event) -> str:
    details = event.details
    where = "at the head of the queue" if details["is_head"] else f"behind {details['head']}"
    return f"waits for {_many(details['steps'], 'step')} {where}: {details['why']}"


def _admitted(event: Event) -> str:
    details = event.details
    verb = "is admitted" if event.kind == "admitted" else "is admitted again"
    hit = f"{details['hit_tokens']:,} of {details['known_tokens']:,} tokens hit"
    if details["loaded_tokens"]:
        hit += f", {details['loaded_tokens']:,} of them loaded from lower tiers"
    groups = ", ".join(
        f"{name} {_many(found['blocks'], 'block')} ({found['tokens']:,} tokens)"
        for name, found in details["hits"].items()
    )
    text = f"{verb} as number {details['running']:,}: {hit}"
    if details["hit_tokens"]:
        text += f"; by group: {groups}"
    if details["limited_by"]:
        text += f"; no longer because of {', '.join(details['limited_by'])}"
    return text


def _chunk(event: Event) -> str:
    details = event.details
    others = details["step_requests"] - 1
    return (
        f"computes {details['tokens']:,} tokens, up to {details['upto']:,}, in a step of "
        f"{details['step_tokens']:,} tokens with {_many(others, 'other request')}"
    )


def _preempted(event: Event) -> str:
    details = event.details
    rule = "the last one admitted" if details["scheduling_policy"] == "fcfs" else "of the lowest priority"
    by = "itself" if details["by"] == details["victim"] else details["by"]
    return (
        f"is preempted for {by}, whose blocks are {_many(details['pages_short'], 'page')} short: it is {rule}; "
        f"it gives up the blocks of {details['lost_tokens']:,} tokens and is next in the queue"
    )


def _preempts(event: Event) -> str:
    details = event.details
    return f"{_many(details['pages_short'], 'page')} short for its blocks: {details['victim']} is preempted for it"


def _finished(event: Event) -> str:
    details = event.details
    return (
        f"finishes after {details['after_s']:,.3f} s with {details['output_tokens']:,} tokens and "
        f"{_many(details['preemptions'], 'preemption')}"
    )


_SENTENCES = {
    "queued": _queued,
    "refused": lambda event: (
        f"is refused: its prompt leaves no room in max_model_len {event.details['max_model_len']:,}"
    ),
    "waits": _waits,
    "admitted": _admitted,
    "resumed": _admitted,
    "chunk": _chunk,
    "decode": lambda event: f"decodes in {_many(event.details['steps'], 'step')}",
    "first_token": lambda event: f"first token, {event.details['after_s']:,.3f} s after its arrival",
    "preempted": _preempted,
    "preempts": _preempts,
    "finished": _finished,
}


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}" + ("" if count == 1 else "s")
