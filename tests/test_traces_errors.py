"""Traces that cannot be read: every content whatever is either read or refused in one sentence."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtide.kvcache import TraceError
from kvtide.sims.traces import Request, open_trace
from kvtide.sims.traces.tracefile import MAX_LINE_BYTES

MOONCAKE = '{"timestamp": 27, "input_length": 700, "output_length": 6, "hash_ids": [1, 2]}\n'
BAILIAN = (
    '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, "output_length": 132, '
    '"type": "text", "turn": 1, "hash_ids": [5, 6, 7]}\n'
)
LLMSERVINGSIM = '{"request_id": "bench-0", "input_toks": 2361, "output_toks": 532, "arrival_time": 1777142984.57}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
AZURE_2025 = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15T12:00:00.269Z,1,770,491\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,472,18,490,Conversation log\n"
WEKA = '{"block_size": 64, "requests": [{"t": 0.5, "in": 99, "out": 5, "hash_ids": [1]}, {"t": 3, "requests": []}]}'
SAMPLES = [MOONCAKE, BAILIAN, LLMSERVINGSIM, AZURE, AZURE_2025, BURSTGPT, WEKA]
GENERIC = {"input": "ContextTokens", "output": "GeneratedTokens", "arrival": "TIMESTAMP"}


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "t"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(path: Path, **arguments: object) -> str:
    with pytest.raises(TraceError) as caught:
        list(open_trace(path, **arguments))
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path))


@pytest.mark.parametrize("value", ["-1", "1.5", '"7"', "true", "null", "[]", "1099511627777", "1e3", "9" * 5000])
@pytest.mark.parametrize(
    ("sample", "key", "good"),
    [
        (MOONCAKE, "input_length", "700"),
        (MOONCAKE, "output_length", "6"),
        (BAILIAN, "input_length", "33"),
        (LLMSERVINGSIM, "input_toks", "2361"),
        (LLMSERVINGSIM, "output_toks", "532"),
        (WEKA, "in", "99"),
        (WEKA, "out", "5"),
        (WEKA, "block_size", "64"),
    ],
)
def test_json_lengths(tmp_path, sample, key, good, value):
    bad = sample.replace(f'"{key}": {good}', f'"{key}": {value}')
    assert bad != sample
    message = refusal(write(tmp_path, bad if sample is WEKA else sample + "\n" + bad))
    if len(value) < 5000:
        assert f"{key} is " in message
        assert "must be a whole number from 0 to 2**40" in message
    assert sample is WEKA or message.startswith(", line 3: ")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "-0.5", "1e400", '"5"', "true", "1" + "0" * 400])
@pytest.mark.parametrize(
    ("sample", "key", "good"),
    [
        (MOONCAKE, "timestamp", "27"),
        (BAILIAN, "timestamp", "61.114"),
        (LLMSERVINGSIM, "arrival_time", "1777142984.57"),
        (WEKA, "t", "0.5"),
    ],
)
def test_json_times(tmp_path, sample, key, good, value):
    bad = sample.replace(f'"{key}": {good}', f'"{key}": {value}')
    assert bad != sample
    message = refusal(write(tmp_path, bad))
    if value in ("NaN", "Infinity", "-Infinity"):
        assert f"has a number that cannot be read: {value} is not a JSON number" in message
    else:
        assert f"{key} is " in message
        assert "must be a finite number from 0 to 2**40" in message


@pytest.mark.parametrize(
    ("ids", "want"),
    [
        ("[1, 2, 3]", "names 3 blocks of 512 tokens, but the prompt of 700 tokens has only 2"),
        ("[1, -2]", "holds -2, but ids go from 0 to 2**63 - 1"),
        ("[1, 9223372036854775808]", "holds 9223372036854775808, but"),
        ("[1, 2.5]", "is [1, 2.5], but must be a list of whole numbers"),
        ("[true]", "is [True], but must be a list"),
        ("7", "is 7, but must be a list"),
    ],
)
def test_hash_ids(tmp_path, ids, want):
    path = write(tmp_path, MOONCAKE * 3 + MOONCAKE.replace("[1, 2]", ids))
    assert refusal(path).startswith(f", line 4: hash_ids {want}")


@pytest.mark.parametrize("key", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_missing_key(tmp_path, key):
    row = json.loads(MOONCAKE)
    del row[key]
    for lines, line in ((MOONCAKE + json.dumps(row), 2), (json.dumps(row), 1)):
        message = refusal(write(tmp_path, lines))
        assert message.startswith(f", line {line}: has no key '{key}'; its keys are ['")


@pytest.mark.parametrize(
    ("sample", "column"),
    [
        (AZURE, "TIMESTAMP"),
        (AZURE, "ContextTokens"),
        (AZURE, "GeneratedTokens"),
        (BURSTGPT, "Timestamp"),
        (BURSTGPT, "Request tokens"),
        (BURSTGPT, "Response tokens"),
    ],
)
def test_missing_column(tmp_path, sample, column):
    message = refusal(write(tmp_path, sample.replace(column, "Other")))
    assert message.startswith(f", line 1: has no column '{column}'; its columns are '")


@pytest.mark.parametrize("value", ["-1", "1.5", "", "x", "1_0", "٣", "1099511627777", "9" * 5000, "nan"])
def test_csv_lengths(tmp_path, value):
    for sample, good, name in ((AZURE, "4808", "ContextTokens"), (BURSTGPT, "18", "Response tokens")):
        message = refusal(write(tmp_path, sample.replace(f",{good},", f",{value},")))
        assert message.startswith(f", line 2: {name} is '{value[:5]}")
        assert "must be a whole number from 0 to 2**40" in message


@pytest.mark.parametrize("value", ["", "5", "2023-02-30 00:00:00", "2023-11-16 24:00:00", "2023-11-16 18:60:00", "nan"])
def test_azure_times(tmp_path, value):
    message = refusal(write(tmp_path, AZURE.replace("2023-11-16 18:17:03.9799600", value)))
    assert message == f", line 2: TIMESTAMP is '{value}', but must be a time like 2023-11-16 18:17:03.9799600"


@pytest.mark.parametrize("value", ["", "nan", "inf", "-1", "1_0", "1e99", "five"])
def test_burstgpt_times(tmp_path, value):
    message = refusal(write(tmp_path, BURSTGPT.replace("\n5,", f"\n{value},")))
    assert message == f", line 2: Timestamp is '{value}', but must be a finite number from 0 to 2**40"


@pytest.mark.parametrize(
    ("content", "want"),
    [
        (MOONCAKE + '{"timestamp": 27,\n', ", line 2: is not valid JSON: "),
        (MOONCAKE + "[1]\n", ", line 2: must hold a JSON object, not [1]"),
        (MOONCAKE + '{"a": ' + "[" * 100_000 + "\n", ", line 2: line 2 nests JSON too deeply"),
        (MOONCAKE.encode() + b"{\xff}\n", ", line 2: byte 0xff at offset 1 is not UTF-8 text"),
        (MOONCAKE + "\0\n", ", line 2: has a NUL byte at offset 0; a trace is plain text"),
        (AZURE + "2023-11-16 18:17:03,1\n", ", line 3: has 2 fields, but the first line has 3"),
        (AZURE + "2023-11-16 18:17:03,1,2,3\n", ", line 3: has 4 fields, but the first line has 3"),
        (AZURE + '"2023-11-16 18:17:03,1,2\n', ", line 3: is not valid CSV: unexpected end of data"),
        (AZURE + '"' + "x" * 200_000, ", line 3: is not valid CSV: field larger than field limit (131072)"),
        (AZURE + "1\0,2,3\n", ", line 3: has a NUL byte at offset 1; a trace is plain text"),
        ("", ": has no requests"),
        (" \r\n\n", ": has no requests"),
        (b"\xef\xbb\xbf", ": has no requests"),
        (AZURE.splitlines()[0], ": has no requests"),
        (BURSTGPT.replace(",18,", ",0,"), ": has no requests (1 skipped)"),
        ('{"block_size": 64, "requests": []}', ": has no requests"),
        ('{"block_size": 0, "requests": []}', ": block_size is 0, but must be from 1 to 1048576"),
        ('{"block_size": 64, "requests": 5}', ": requests is 5, but must be a list"),
        ('{"block_size": 64, "requests": [5]}', ": request 1: is 5, but must be a JSON object"),
        ('{"requests": []}', ": has no key 'block_size'; its keys are ['requests']"),
        ('{"block_size": 64,\n "requests": [,]}', ", line 2: is not valid JSON: Expecting value at column 15"),
        (
            WEKA.replace('"requests": []', '"requests": [{"t": 1}]'),
            ": request 2.1: has no key 'in'; its keys are ['t']",
        ),
        (WEKA.replace("[1]", "[1, 2, 3]"), ": request 1: hash_ids names 3 blocks of 64 tokens"),
        (WEKA[:-1] + ', "hash_id_scope": "galaxy"}', ": hash_id_scope is 'galaxy', but must be 'local' or 'global'"),
        (AZURE.encode("utf-16"), ", line 1: byte 0xff at offset 0 is not UTF-8 text"),
        (b"\0" * 5000, ", line 1: has a NUL byte at offset 0"),
        (b"PAR1\x15\x04", ": is Parquet data; unpack or convert it first"),
    ],
)
def test_broken_content(tmp_path, content, want):
    assert refusal(write(tmp_path, content)).startswith(want)


def test_error_comes_at_its_row_and_not_before(tmp_path):
    requests = iter(open_trace(write(tmp_path, MOONCAKE * 2 + "x\n")))
    assert [next(requests).request_id, next(requests).request_id] == ["1", "2"]
    with pytest.raises(TraceError, match="line 3"):
        next(requests)


@pytest.mark.parametrize("content", ["a,b,c\n1,2,3\n", '{"prompt": 5, "gen": 6}\n', "[1, 2]", "hello", '{"a": 1'])
def test_unknown_format_says_what_was_seen_and_what_helps(tmp_path, content):
    message = refusal(write(tmp_path, content))
    assert message.startswith(": is in no known format (its ")
    assert "prompt" not in content or "its keys are ['prompt', 'gen']" in message
    assert (
        "known are mooncake, qwen-bailian, azure, burstgpt, llmservingsim, token-ids, weka, servegen, generic, demo"
        in message
    )
    assert "name its columns: input=..., output=..." in message


def test_a_format_that_is_forced_names_what_it_misses(tmp_path):
    path = write(tmp_path, "a,b\n1,2\n")
    assert refusal(path, format="azure") == ", line 1: has no column 'TIMESTAMP'; its columns are 'a', 'b'"
    assert refusal(path, format="mooncake").startswith(", line 1: is not valid JSON: ")
    assert refusal(path, format="servegen") == ": is a file, but the format servegen is a folder of them"
    assert refusal(path, columns={"input": "a", "output": "c"}).startswith(", line 1: has no column 'c'")
    assert refusal(write(tmp_path, ""), format="burstgpt") == ": has no requests"


@pytest.mark.parametrize("kept", [2, 9, 15, 40, 2000, -1])
def test_truncated_gzip(tmp_path, kept):
    rows = "".join(MOONCAKE.replace("27", str(i * 7919 % 100_003)) for i in range(20_000))
    path = write(tmp_path, gzip.compress(rows.encode())[:kept])
    message = refusal(path)
    assert "the gzip data is cut off or damaged from here on" in message
    assert ", line " in message or kept <= 40


@pytest.mark.parametrize("seed", range(20))
def test_damaged_gzip(tmp_path, seed):
    # What the damage unpacks to, text or not, differs from seed to seed; the message does not.
    noise = random.Random(seed).randbytes(100)
    data = bytearray(gzip.compress(noise + MOONCAKE.encode()))
    data[20:60] = b"x" * 40
    assert "cut off or damaged" in refusal(write(tmp_path, bytes(data)))


def test_damaged_gzip_that_unpacks_to_wrong_rows(tmp_path):
    # Stored, not deflated, so that a flipped byte stays a plausible row and only the checksum tells.
    data = bytearray(gzip.compress(MOONCAKE.encode(), compresslevel=0))
    data[data.index(b"input_length")] = ord("x")
    assert "cut off or damaged" in refusal(write(tmp_path, bytes(data)))


def test_intact_gzip_of_bad_rows_is_not_called_damaged(tmp_path):
    message = refusal(write(tmp_path, gzip.compress(MOONCAKE.encode() + b"\xff\n")))
    assert "is not UTF-8 text" in message
    assert "damaged" not in message


def test_line_without_end_is_not_read_whole(tmp_path):
    path = tmp_path / "t"
    with path.open("wb") as file:
        file.write(b'{"input_length": "')
        file.seek(MAX_LINE_BYTES + 100)
        file.write(b"x")
    path.write_bytes(path.read_bytes().replace(b"\0", b"x"))
    assert refusal(path) == ", line 1: is longer than 64 MiB, which no known format has"


def test_sources_that_are_no_trace(tmp_path):
    assert refusal(tmp_path / "absent").startswith(": does not exist; a trace is a file, a folder, or the word demo")
    assert refusal(tmp_path).startswith(": is a folder without chunk-*-dataset.json, requests.jsonl or *.json")
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe").startswith(": is neither a file nor a folder")
    (tmp_path / "requests.jsonl").write_text(LLMSERVINGSIM)
    assert refusal(tmp_path, format="weka").endswith("in the format llmservingsim, but the format asked for is weka")
    with pytest.raises(TraceError, match="does not exist"):
        open_trace("nul\0byte")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_unreadable_file(tmp_path):
    path = write(tmp_path, MOONCAKE)
    path.chmod(0)
    assert refusal(path) == ": cannot be read: Permission denied"


def read_or_refuse(path: Path, **arguments: object) -> None:
    """Read all of a trace; anything but sound requests and `TraceError` fails the test."""
    try:
        requests = list(open_trace(path, **arguments))
    except TraceError:
        return
    assert requests
    for request in requests:
        assert type(request) is Request
        assert 0 <= request.arrival_s < math.inf
        assert 0 <= request.image_tokens <= request.input_tokens <= 2**40
        assert 0 <= request.output_tokens <= 2**40
        if request.hash_ids is not None:
            assert len(request.hash_ids) <= -(-request.input_tokens // request.hash_block)


FORCED = st.sampled_from(["mooncake", "qwen-bailian", "azure", "burstgpt", "llmservingsim", "weka", None])
PER_EXAMPLE_FOLDER = [HealthCheck.function_scoped_fixture]


@settings(max_examples=400, deadline=None, suppress_health_check=PER_EXAMPLE_FOLDER)
@given(
    content=st.binary(max_size=400),
    prefix=st.sampled_from([b"", b"\x1f\x8b", b"{", b'{"requests":', b"a,b\n"]),
    format=FORCED,
)
def test_any_bytes(tmp_path, content, prefix, format):
    read_or_refuse(write(tmp_path, prefix + content), format=format)


@st.composite
def mutated_samples(draw: st.DrawFn) -> bytes:
    """One of the samples, repeated, with a few stretches replaced."""
    sample = draw(st.sampled_from(SAMPLES))
    data = bytearray((sample * draw(st.integers(1, 3))).encode())
    patches = st.one_of(
        st.binary(max_size=3),
        st.sampled_from(
            [b"-", b"9" * 30, b"NaN", b"1e999", b"null", b'"', b"\n", b",", b"[", b"{}", b"\xef\xbb\xbf", b"\r"]
        ),
    )
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 6))] = draw(patches)
    return bytes(data) if draw(st.booleans()) else gzip.compress(bytes(data))


@settings(max_examples=1500, deadline=None, suppress_health_check=PER_EXAMPLE_FOLDER)
@given(content=mutated_samples(), generic=st.booleans())
def test_mutated_rows(tmp_path, content, generic):
    read_or_refuse(write(tmp_path, content), columns=GENERIC if generic else None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=600, deadline=None, suppress_health_check=PER_EXAMPLE_FOLDER)
@given(sample=st.sampled_from([MOONCAKE, BAILIAN, LLMSERVINGSIM, WEKA]), data=st.data())
def test_any_json_value_in_any_place(tmp_path, sample, data):
    row = json.loads(sample)
    target = row["requests"][0] if "requests" in row and data.draw(st.booleans()) else row
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(JSON)
    read_or_refuse(write(tmp_path, json.dumps(row)))


def test_a_small_document_takes_little_memory(tmp_path):
    path = write(tmp_path, WEKA)
    tracemalloc.start()
    try:
        assert len(list(open_trace(path))) == 1
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
