"""Readers of the JSON-lines traces: Mooncake and its relatives, Qwen-Bailian, LLMServingSim's measured requests.

Traces with token ids are LLMServingSim's workloads, or any file with vLLM's names for them.

Each takes an open `TraceFile` and yields one `Request` per line. The Mooncake layout is also used by derived traces
with other block sizes, and nothing in the file says which: the size is the one that fits the number of ids to the
length of the prompts in the first rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from kvtide.kvcache import TraceError

from .fields import count, prefix_blocks, seconds, value_of
from .request import Request
from .tracefile import TraceFile, show

# Mooncake's own size first: it wins while the rows read so far fit several.
HASH_BLOCKS = (512, 16, 64, 32, 128, 256, 1024)
_PROBED_ROWS = 64
_BAILIAN_BLOCK = 16
# The two highest ids mark reasoning in the simulator.
_TOKENS = 2**31 - 2


def read_mooncake(file: TraceFile) -> Iterator[Request]:
    """Yield the requests of a Mooncake trace: `timestamp` ms, `input_length`, `output_length`, `hash_ids`."""
    block = _hash_block(file)
    for row in file.objects():
        input_tokens = count(value_of(row, "input_length", file), "input_length", file)
        yield Request(
            request_id=str(file.line),
            arrival_s=seconds(value_of(row, "timestamp", file), "timestamp", file) / 1000,
            input_tokens=input_tokens,
            output_tokens=count(value_of(row, "output_length", file), "output_length", file),
            hash_ids=prefix_blocks(value_of(row, "hash_ids", file), input_tokens, block, file),
            hash_block=block,
        )


def _hash_block(file: TraceFile) -> int:
    # The last, partial block is named in Mooncake's traces and left out in derived ones: a trace does one or the other.
    all_blocks: Counter[int] = Counter()
    full_blocks: Counter[int] = Counter()
    with suppress(TraceError):  # reading proper comes to the bad row again, at its turn
        for row in islice(TraceFile(file.path).objects(), _PROBED_ROWS):
            tokens, ids = row.get("input_length"), row.get("hash_ids")
            if type(tokens) is int and type(ids) is list:
                all_blocks.update(block for block in HASH_BLOCKS if len(ids) == -(-tokens // block))
                full_blocks.update(block for block in HASH_BLOCKS if len(ids) == tokens // block)
    return max(HASH_BLOCKS, key=lambda block: max(all_blocks[block], full_blocks[block]))


def read_bailian(file: TraceFile) -> Iterator[Request]:
    """Yield the requests of a Qwen-Bailian trace: Mooncake's keys, `timestamp` in s, `chat_id`, 16-token blocks."""
    for row in file.objects():
        chat = value_of(row, "chat_id", file)
        if type(chat) not in (int, str):
            raise file.error(f"chat_id is {show(chat)}, but must be a number or a string")
        input_tokens = count(value_of(row, "input_length", file), "input_length", file)
        yield Request(
            request_id=str(chat),
            arrival_s=seconds(value_of(row, "timestamp", file), "timestamp", file),
            input_tokens=input_tokens,
            output_tokens=count(value_of(row, "output_length", file), "output_length", file),
            hash_ids=prefix_blocks(value_of(row, "hash_ids", file), input_tokens, _BAILIAN_BLOCK, file),
            hash_block=_BAILIAN_BLOCK,
        )


def read_llmservingsim(file: TraceFile) -> Iterator[Request]:
    """Yield the requests of a run measured by LLMServingSim: `input_toks`, `output_toks`, `arrival_time` in unix s.

    Arrival counts from the first row. What the engine did with a request (`queued_ts` and so on) is not read.
    """
    first: float | None = None
    for row in file.objects():
        name = value_of(row, "request_id", file)
        if type(name) is not str:
            raise file.error(f"request_id is {show(name)}, but must be a string")
        arrival = seconds(value_of(row, "arrival_time", file), "arrival_time", file)
        first = arrival if first is None else first
        yield Request(
            request_id=name,
            arrival_s=max(0.0, arrival - first),
            input_tokens=count(value_of(row, "input_toks", file), "input_toks", file),
            output_tokens=count(value_of(row, "output_toks", file), "output_toks", file),
        )


def read_token_ids(file: TraceFile) -> Iterator[Request]:
    """Yield requests whose tokens are known: `prompt_token_ids`, `output_token_ids`, and `timestamp` in ms.

    Or as in LLMServingSim's workloads: `input_tok_ids`, `output_tok_ids`, `arrival_time_ns`. Without a time all come at
    once. `request_id` is optional.
    """
    for row in file.objects():
        theirs = "input_tok_ids" in row
        prompt, output = (
            _token_ids(value_of(row, name, file), name, file)
            for name in (("input_tok_ids", "output_tok_ids") if theirs else ("prompt_token_ids", "output_token_ids"))
        )
        clock, per_second = ("arrival_time_ns", 1e9) if theirs else ("timestamp", 1000.0)
        at = row.get(clock, 0)
        yield Request(
            request_id=str(row.get("request_id", file.line)),
            arrival_s=seconds(at / per_second if type(at) in (int, float) else at, clock, file),
            input_tokens=len(prompt),
            output_tokens=len(output),
            prompt_ids=prompt,
            output_ids=output,
        )


def _token_ids(value: object, name: str, file: TraceFile) -> tuple[int, ...]:
    if type(value) is not list:
        raise file.error(f"{name} is {show(value)}, but must be a list of token ids")
    for token in value:
        if type(token) is not int or not 0 <= token < _TOKENS:
            raise file.error(f"{name} has {show(token)}, but token ids are from 0 to {_TOKENS - 1}")
    return tuple(value)
