"""Opening a trace: find out by content what it is, and hand back its requests as a stream.

`open_trace` is the door of this package. It looks at the first megabyte of a file (never at its name) or at what a
folder holds, picks the reader, and returns at once; rows are read as the trace is iterated. A source that is missing,
empty or of no known format raises `TraceError`, an argument that cannot be used `ConfigError`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvtide.kvcache import ConfigError, TraceError

from .demo import DEFAULT_REQUESTS, generate_demo
from .jsonlines import read_bailian, read_llmservingsim, read_mooncake, read_token_ids
from .request import Progress, Request, Trace
from .servegen import DATASET_GLOB, sample_servegen
from .tables import AZURE_COLUMNS, BURSTGPT_COLUMNS, GENERIC_KEYS, read_azure, read_burstgpt, read_generic
from .tracefile import TraceFile, show
from .weka import read_weka

FORMATS = {
    "mooncake": "Mooncake JSON lines (also derived traces with other block sizes)",
    "qwen-bailian": "Qwen-Bailian JSON lines",
    "azure": "Azure LLM inference CSV of 2023, 2024 and 2025 (multimodal)",
    "burstgpt": "BurstGPT CSV",
    "llmservingsim": "LLMServingSim requests.jsonl, or the folder of the run",
    "token-ids": "JSON lines of prompt_token_ids and output_token_ids (or LLMServingSim's input_tok_ids, ...)",
    "weka": "WEKA coding-agent conversation JSON, or a folder of them",
    "servegen": "ServeGen folder of chunk-N-dataset.json and chunk-N-trace.csv",
    "generic": "any CSV or JSON lines whose columns are named",
    "demo": "generated: the word demo instead of a path",
}
DEFAULT_TOKENS_PER_IMAGE = 256  # what Gemma 3 spends on one; Azure's prompts of many images leave no room for more

_PLAIN_READERS: dict[str, Callable[[TraceFile], Iterator[Request]]] = {
    "mooncake": read_mooncake,
    "qwen-bailian": read_bailian,
    "burstgpt": read_burstgpt,
    "llmservingsim": read_llmservingsim,
    "token-ids": read_token_ids,
}
_NEEDED_KEYS = ("input", "output")
_HEAD_BYTES = 1 << 20
_MAGIC = {b"PAR1": "Parquet", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2"}
_JSON_KEY = re.compile(r'"((?:[^"\\]|\\.){1,64})"\s*:')


def open_trace(
    source: str | os.PathLike[str],
    *,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    tokens_per_image: int = DEFAULT_TOKENS_PER_IMAGE,
    seed: int = 0,
    num_requests: int | None = None,
    duration_s: float | None = None,
) -> Trace:
    """Open a file, a folder, or the generated trace `demo`.

    `format` is one of `FORMATS`; None detects it. `columns` maps "input" and "output", and optionally "arrival",
    "images" and "reasoning", to the column names of a CSV or JSON-lines file of your own. `tokens_per_image` splits
    the prompt where a trace counts images only. `seed` is for generated traces. `num_requests` keeps the first
    requests, `duration_s` those that arrive before so many seconds.

    Raises `TraceError` for a source that cannot be read as a trace, `ConfigError` for an argument out of range.
    """
    _check_arguments(format, columns, tokens_per_image, seed, num_requests, duration_s)
    if columns is not None:
        format = "generic"
    if format == "demo" and source != "demo":
        raise ConfigError(f"format 'demo' is generated and takes the source 'demo', not {show(os.fspath(source))}")
    progress = Progress()
    if source == "demo" and format in (None, "demo"):
        if num_requests is None and duration_s is None:
            num_requests = DEFAULT_REQUESTS
        requests = _bounded(generate_demo(seed), "demo", progress, num_requests, duration_s, in_order=True)
        return Trace("demo", "demo", requests, progress=progress)
    path = Path(source)
    try:
        if not path.exists():
            raise TraceError(f"{path}: does not exist; a trace is a file, a folder, or the word demo")
        found, files = _look_into(path, format)
        num_bytes = sum(file.stat().st_size for file in files)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    if found == "servegen":
        requests = sample_servegen(path, seed, progress)
    elif found == "weka":
        requests = read_weka([TraceFile(file, progress) for file in files])
    else:
        requests = _read_file(TraceFile(files[0], progress), found, columns, tokens_per_image)
    requests = _bounded(requests, str(path), progress, num_requests, duration_s, in_order=found == "servegen")
    return Trace(path.name or str(path), found, requests, num_bytes, progress)


def _check_arguments(
    format: str | None,
    columns: Mapping[str, str] | None,
    tokens_per_image: int,
    seed: int,
    num_requests: int | None,
    duration_s: float | None,
) -> None:
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format is {show(format)}, but must be one of {', '.join(FORMATS)}")
    if columns is None:
        if format == "generic":
            raise ConfigError(f"format 'generic' needs columns that name {' and '.join(_NEEDED_KEYS)}")
    else:
        if format not in (None, "generic"):
            raise ConfigError(f"columns are for the format 'generic', not {format!r}, which has names of its own")
        for key, name in columns.items():
            if key not in GENERIC_KEYS or not isinstance(name, str):
                raise ConfigError(f"columns has {show(key)}: {show(name)}, but maps {', '.join(GENERIC_KEYS)} to names")
        for key in _NEEDED_KEYS:
            if key not in columns:
                raise ConfigError(f"columns must name {key!r}; it names {', '.join(columns) or 'nothing'}")
    if not 0 <= tokens_per_image <= 1 << 20:
        raise ConfigError(f"tokens_per_image is {tokens_per_image}, but must be from 0 to 2**20")
    if not 0 <= seed < 1 << 64:
        raise ConfigError(f"seed is {seed}, but must be from 0 to 2**64 - 1")
    if num_requests is not None and num_requests < 1:
        raise ConfigError(f"num_requests is {num_requests}, but must be at least 1")
    if duration_s is not None and not 0 < duration_s < float("inf"):
        raise ConfigError(f"duration_s is {duration_s}, but must be a positive number of seconds")


def _look_into(path: Path, format: str | None) -> tuple[str, list[Path]]:
    """Return the format of a file or folder and the files to read, none where they only describe what to sample."""
    if not path.is_dir():
        if not path.is_file():
            raise TraceError(f"{path}: is neither a file nor a folder; a pipe cannot be looked at before it is read")
        if format == "servegen":
            raise TraceError(f"{path}: is a file, but the format servegen is a folder of them")
        return format or _detect(path), [path]
    if any(path.glob(DATASET_GLOB)):
        found, files = "servegen", []
    elif (path / "requests.jsonl").is_file():
        found, files = "llmservingsim", [path / "requests.jsonl"]
    else:
        files = sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")) and file.is_file())
        found = _detect(files[0]) if files else ""
        if found != "weka":
            raise TraceError(
                f"{path}: is a folder without {DATASET_GLOB}, requests.jsonl or *.json conversations; "
                "name a file in it to read that one"
            )
    if format not in (None, found):
        raise TraceError(f"{path}: is a folder in the format {found}, but the format asked for is {format}")
    return found, files


def _detect(path: Path) -> str:
    file = TraceFile(path)
    head = file.head(_HEAD_BYTES)
    if not head.strip():
        raise file.error("has no requests")
    text = head.decode("utf-8", "replace").lstrip()
    first_line = text.partition("\n")[0]
    if text.startswith("{"):
        seen = _json_keys(first_line, text)
        if "requests" in seen:
            return "weka"
        if "hash_ids" in seen or "input_length" in seen:
            return "qwen-bailian" if "chat_id" in seen else "mooncake"
        if "prompt_token_ids" in seen or "input_tok_ids" in seen:
            return "token-ids"
        if "input_toks" in seen or "output_toks" in seen:
            return "llmservingsim"
        looks = f"its keys are {show(seen)}"
    else:
        seen = [title.strip() for title in first_line.replace('"', "").split(",")]
        for name, columns in (("azure", AZURE_COLUMNS), ("burstgpt", BURSTGPT_COLUMNS)):
            if len(set(columns) & set(seen)) >= 2:  # the reader names the missing one
                return name
        looks = f"its first line is {show(first_line.rstrip())}"
    for magic, compression in _MAGIC.items():
        if head.startswith(magic):
            raise file.error(f"is {compression} data; unpack or convert it first (gzip is read as it is)")
    next(file.lines(), None)  # a file that is no text says so here
    file.line = 0
    raise file.error(
        f"is in no known format ({looks}); known are {', '.join(FORMATS)}; "
        "to read another CSV or JSON-lines file, name its columns: input=..., output=..., and arrival=... if it has one"
    )


def _json_keys(first_line: str, text: str) -> list[str]:
    """Return the keys of the first object, or those in sight where it does not end in its line or in the head."""
    try:
        row = json.loads(first_line)
    except (ValueError, RecursionError):
        return list(dict.fromkeys(_JSON_KEY.findall(text)))
    return list(row)


def _read_file(
    file: TraceFile, format: str, columns: Mapping[str, str] | None, tokens_per_image: int
) -> Iterator[Request]:
    if columns is not None:
        return read_generic(file, columns, tokens_per_image)
    if format == "azure":
        return read_azure(file, tokens_per_image)
    return _PLAIN_READERS[format](file)


def _bounded(
    requests: Iterator[Request],
    name: str,
    progress: Progress,
    num_requests: int | None,
    duration_s: float | None,
    *,
    in_order: bool,
) -> Iterator[Request]:
    """Yield the requests that the caller asked for; there must be one."""
    num_yielded = 0
    for request in requests:
        if duration_s is not None and request.arrival_s >= duration_s:
            if in_order:
                break
            continue
        yield request
        num_yielded += 1
        if num_yielded == num_requests:
            return
    if not num_yielded:
        before = f" before {duration_s:g} s" if duration_s is not None else ""
        skipped = f" ({progress.num_skipped:,} skipped)" if progress.num_skipped else ""
        raise TraceError(f"{name}: has no requests{before}{skipped}")
