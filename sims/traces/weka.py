"""Reader of coding-agent conversations as WEKA's kv-cache-tester publishes them: one JSON document per conversation.

A conversation's `requests` hold `t` (s), `in`, `out`, `hash_ids`; an entry with `requests` of its own is a sub-agent,
whose times count from its start. The requests of a conversation come flattened, in order of time; conversations follow
one another in the order of their file names, and each starts at 0 s, as if all users began at once. Ids are local to a
file unless it says `hash_id_scope: global`, and are renumbered so that two conversations share no block. Where the
tokens of tools and system prompt end, other prompts may part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count as counter
from typing import Any, NamedTuple

from kvtide.kvcache import TraceError

from .fields import count, prefix_blocks, seconds, value_of
from .request import Request
from .tracefile import TraceFile, show

_MAX_BLOCK = 1 << 20


class _Entry(NamedTuple):
    """A place inside a conversation: a JSON document has no lines, so errors count its requests."""

    file: TraceFile
    number: str

    def error(self, what: str) -> TraceError:
        return self.file.error(f"request {self.number}: {what}")


def read_weka(files: Iterable[TraceFile]) -> Iterator[Request]:
    """Yield the requests of all conversations; one file is in memory at a time."""
    fresh_id = counter()
    shared: defaultdict[int, int] = defaultdict(fresh_id.__next__)
    for file in files:
        document = file.document()
        if type(document) is not dict:
            raise file.error(f"must hold a JSON object, not {show(document)}")
        block = count(value_of(document, "block_size", file), "block_size", file)
        if not 1 <= block <= _MAX_BLOCK:
            raise file.error(f"block_size is {block}, but must be from 1 to {_MAX_BLOCK}")
        scope = document.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise file.error(f"hash_id_scope is {show(scope)}, but must be 'local' or 'global'")
        system = sum(count(document.get(key, 0), key, file) for key in ("tool_tokens", "system_tokens"))
        ids = shared if scope == "global" else defaultdict(fresh_id.__next__)
        for number, (arrival, row, place) in enumerate(_in_time_order(document, file)):
            input_tokens = count(value_of(row, "in", place), "in", place)
            blocks = prefix_blocks(value_of(row, "hash_ids", place), input_tokens, block, place)
            yield Request(
                request_id=f"{file.path.stem}/{number}",
                arrival_s=arrival,
                input_tokens=input_tokens,
                output_tokens=count(value_of(row, "out", place), "out", place),
                hash_ids=tuple(map(ids.__getitem__, blocks)),
                hash_block=block,
                turn_ends=(system,) if 0 < system < input_tokens else (),
            )


def _in_time_order(document: dict[str, Any], file: TraceFile) -> list[tuple[float, dict[str, Any], _Entry]]:
    found: list[tuple[float, dict[str, Any], _Entry]] = []
    agents = [(0.0, document, "")]
    for start, agent, label in agents:  # grows while sub-agents turn up
        rows = agent["requests"] if label else value_of(agent, "requests", file)
        if type(rows) is not list:
            raise file.error(f"requests{' of ' + label if label else ''} is {show(rows)}, but must be a list")
        for number, row in enumerate(rows, 1):
            place = _Entry(file, f"{label}{number}")
            if type(row) is not dict:
                raise place.error(f"is {show(row)}, but must be a JSON object")
            at = start + seconds(value_of(row, "t", place), "t", place)
            if "requests" in row:
                agents.append((at, row, f"{place.number}."))
            else:
                found.append((at, row, place))
    found.sort(key=lambda entry: entry[0])
    return found
