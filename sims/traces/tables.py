"""Readers of the CSV traces: Azure 2023, 2024 and 2025, BurstGPT, and any other table whose columns are named.

Each takes an open `TraceFile` and yields one `Request` per row. Times of day count from the first row; a row that the
log holds a little too late is taken to arrive with the first. Where a trace counts images and not their tokens
(Azure 2025), every image is taken to have `tokens_per_image` tokens *inside* the prompt, as Azure documents its
`ContextTokens` to include them, and never more than the prompt; the trace's notes say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .fields import clock_ns, count, count_text, seconds, seconds_text, value_of
from .request import Request
from .tracefile import TraceFile, show

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
GENERIC_KEYS = ("input", "output", "arrival", "images", "reasoning")


def read_azure(file: TraceFile, tokens_per_image: int) -> Iterator[Request]:
    """Yield the requests of an Azure LLM (2023, 2024) or multimodal (2025, with `NumImages`) inference trace."""
    records = file.records()
    header = next(records, [])
    at, context, generated = _columns(header, AZURE_COLUMNS, file)
    images = _find(header, "NumImages")
    if images is not None:
        file.progress.notes.append(_image_note(tokens_per_image))
    first: int | None = None
    for record in records:
        now = clock_ns(record[at], "TIMESTAMP", file)
        first = now if first is None else first
        input_tokens = count_text(record[context], "ContextTokens", file)
        num_images = 0 if images is None else count_text(record[images], "NumImages", file)
        yield Request(
            request_id=str(file.line),
            arrival_s=max(0, now - first) / 1e9,
            input_tokens=input_tokens,
            output_tokens=count_text(record[generated], "GeneratedTokens", file),
            image_tokens=min(num_images * tokens_per_image, input_tokens),
        )


def read_burstgpt(file: TraceFile) -> Iterator[Request]:
    """Yield the requests of a BurstGPT trace, with or without sessions; rows without a response failed: skipped."""
    records = file.records()
    at, request, response = _columns(next(records, []), BURSTGPT_COLUMNS, file)
    for record in records:
        arrival = seconds_text(record[at], "Timestamp", file)
        input_tokens = count_text(record[request], "Request tokens", file)
        output_tokens = count_text(record[response], "Response tokens", file)
        if output_tokens == 0:
            file.progress.num_skipped += 1
            continue
        yield Request(str(file.line), arrival, input_tokens, output_tokens)


def read_generic(file: TraceFile, columns: Mapping[str, str], tokens_per_image: int) -> Iterator[Request]:
    """Yield the requests of any CSV or JSON-lines file whose columns are named.

    `columns` maps `input` and `output` (tokens), and if the file has them `arrival` (seconds, or a date and time),
    `images` (a number of images) and `reasoning` (tokens), to the file's own names. Without `arrival` everything
    arrives at 0 s.
    """
    if "images" in columns:
        file.progress.notes.append(_image_note(tokens_per_image))
    first: int | None = None
    for row in _named_values(file, columns):
        arrival = 0
        if "arrival" in row:
            now = _nanoseconds(row["arrival"], columns["arrival"], file)
            first = now if first is None else first
            arrival = max(0, now - first)
        input_tokens = _tokens(row["input"], columns["input"], file)
        num_images = _tokens(row["images"], columns["images"], file) if "images" in row else 0
        yield Request(
            request_id=str(file.line),
            arrival_s=arrival / 1e9,
            input_tokens=input_tokens,
            output_tokens=_tokens(row["output"], columns["output"], file),
            image_tokens=min(num_images * tokens_per_image, input_tokens),
            reasoning_tokens=_tokens(row["reasoning"], columns["reasoning"], file) if "reasoning" in row else None,
        )


def _named_values(file: TraceFile, columns: Mapping[str, str]) -> Iterator[dict[str, object]]:
    if TraceFile(file.path).head(4096).lstrip().startswith(b"{"):
        for row in file.objects():
            yield {key: value_of(row, name, file) for key, name in columns.items()}
        return
    records = file.records()
    places = _columns(next(records, []), list(columns.values()), file)
    for record in records:
        yield {key: record[place] for key, place in zip(columns, places, strict=True)}


def _tokens(value: object, name: str, file: TraceFile) -> int:
    return count_text(value, name, file) if isinstance(value, str) else count(value, name, file)


def _nanoseconds(value: object, name: str, file: TraceFile) -> int:
    if isinstance(value, str):
        if value.strip()[4:5] == "-":  # 2023-..., which no number is
            return clock_ns(value, name, file)
        number = seconds_text(value, name, file)
    else:
        number = seconds(value, name, file)
    whole, part = divmod(number, 1.0)  # exact, where a product of unix seconds and 1e9 is not
    return int(whole) * 1_000_000_000 + round(part * 1e9)


def _image_note(tokens_per_image: int) -> str:
    return f"the trace counts images, not their tokens: {tokens_per_image} tokens per image assumed"


def _find(header: Sequence[str], name: str) -> int | None:
    return next((place for place, title in enumerate(header) if title.strip() == name), None)


def _columns(header: Sequence[str], names: Sequence[str], file: TraceFile) -> list[int]:
    if not header:
        raise file.error("has no requests")
    places = [_find(header, name) for name in names]
    if None in places:
        seen = ", ".join(map(show, header[:20]))
        raise file.error(f"has no column {names[places.index(None)]!r}; its columns are {seen}")
    return [place for place in places if place is not None]
