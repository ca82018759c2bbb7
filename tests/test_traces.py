"""Every trace format from small samples: what is detected, what a request becomes, what streaming costs."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path

import pytest

from kvtide.kvcache import ConfigError, TraceError
from kvtide.sims.traces import Request, open_trace

AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n"
    "2023-11-16 18:17:04.0319601,3180,8"  # no newline at the end, as published
)
BURSTGPT_1 = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
)


def mooncake_row(timestamp: float, input_length: int, block: int, *, partial: bool) -> dict[str, object]:
    num_ids = -(-input_length // block) if partial else input_length // block
    ids = list(range(num_ids))
    return {"timestamp": timestamp, "input_length": input_length, "output_length": 6, "hash_ids": ids}


def write_jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("partial", [True, False])
def test_mooncake_block_size_comes_from_the_rows(tmp_path, block, partial):
    rows = [mooncake_row(i * 27.5, 700 + 911 * i, block, partial=partial) for i in range(20)]
    trace = open_trace(write_jsonl(tmp_path / "t.csv", *rows))  # the name says nothing
    requests = list(trace)
    assert trace.format == "mooncake"
    assert {request.hash_block for request in requests} == {block}
    assert requests[1] == Request("2", 0.0275, 1611, 6, hash_ids=tuple(rows[1]["hash_ids"]), hash_block=block)


def test_mooncake_block_size_survives_a_row_that_fits_nothing(tmp_path):
    rows = [mooncake_row(i, 1000 + i, 16, partial=False) for i in range(5)]
    rows[2]["hash_ids"] = [1]
    assert {r.hash_block for r in open_trace(write_jsonl(tmp_path / "t", *rows))} == {16}


def test_bailian(tmp_path):
    row = {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 33, "output_length": 132}
    row |= {"type": "text", "turn": 2, "hash_ids": [1089, 1090, 1091]}
    trace = open_trace(write_jsonl(tmp_path / "t", row))
    assert trace.format == "qwen-bailian"
    assert list(trace) == [Request("159", 61.114, 33, 132, hash_ids=(1089, 1090, 1091), hash_block=16)]


def test_azure_keeps_its_hundred_nanoseconds(tmp_path):
    path = tmp_path / "t"
    path.write_text(AZURE_2023, newline="")
    trace = open_trace(path)
    assert trace.format == "azure"
    assert list(trace) == [Request("2", 0.0, 4808, 10), Request("3", 0.0520001, 3180, 8)]


@pytest.mark.parametrize(
    ("first", "second", "gap_s"),
    [
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01+00:00", 0.99007),  # 2024: zone, fraction may lack
        ("2024-10-15T12:00:00.269Z", "2024-10-15T12:00:05.819Z", 5.55),  # 2025
        ("2024-02-29 23:59:59", "2024-03-01 00:00:00.5", 1.5),
        ("2024-05-10 12:00:00+05:30", "2024-05-10 06:30:01Z", 1.0),
        ("2024-05-10 12:00:00-0200", "2024-05-10 14:00:01", 1.0),
        ("2024-05-10 12:00:01", "2024-05-10 12:00:00.9", 0.0),  # a little out of order: never negative
    ],
)
def test_azure_times(tmp_path, first, second, gap_s):
    path = tmp_path / "t"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{first},1,2\n{second},3,4\n")
    assert [request.arrival_s for request in open_trace(path)] == [0.0, gap_s]


def test_azure_multimodal_splits_the_prompt(tmp_path):
    path = tmp_path / "t"
    path.write_text(
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
        "2024-10-15T12:00:00.269Z,0,770,491\n2024-10-15T12:00:05.819Z,2,949,126\n2024-10-15T12:00:06.513Z,16,964,79\n"
    )
    trace = open_trace(path)
    assert [(r.input_tokens, r.image_tokens) for r in trace] == [(770, 0), (949, 512), (964, 964)]
    assert trace.notes == ("the trace counts images, not their tokens: 256 tokens per image assumed",)
    assert [r.image_tokens for r in open_trace(path, tokens_per_image=10)] == [0, 20, 160]


def test_burstgpt_skips_and_counts_failures(tmp_path):
    path = tmp_path / "t"
    path.write_text(BURSTGPT_1 + "45,GPT-4,1087,0,1087,Conversation log\n1106.5,ChatGPT,3,4,7,API log\n")
    trace = open_trace(path)
    assert list(trace) == [Request("2", 5.0, 472, 18), Request("4", 1106.5, 3, 4)]
    assert (trace.format, trace.num_skipped) == ("burstgpt", 1)


def test_burstgpt_with_sessions(tmp_path):
    path = tmp_path / "t"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5.0,,3.2,ChatGPT,472,18,490,API log\n"
    )
    assert list(open_trace(path)) == [Request("2", 5.0, 472, 18)]


def test_llmservingsim_file_and_folder(tmp_path):
    rows = [
        {"request_id": f"bench-{i}", "input_toks": 2361, "output_toks": 532, "arrival_time": 1777142984.5 + i}
        for i in range(2)
    ]
    path = write_jsonl(tmp_path / "requests.jsonl", *rows)
    want = [Request("bench-0", 0.0, 2361, 532), Request("bench-1", 1.0, 2361, 532)]
    assert list(open_trace(path)) == want
    trace = open_trace(tmp_path)
    assert (trace.format, list(trace)) == ("llmservingsim", want)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt_token_ids": [5, 6, 7], "output_token_ids": [8, 9], "timestamp": 1500, "request_id": "x"},
        {"input_tok_ids": [5, 6, 7], "output_tok_ids": [8, 9], "arrival_time_ns": 1_500_000_000, "request_id": "x"},
    ],
    ids=["vllm", "llmservingsim"],
)
def test_token_ids(tmp_path, row):
    trace = open_trace(write_jsonl(tmp_path / "trace.jsonl", row))
    assert (trace.format, list(trace)) == (
        "token-ids",
        [Request("x", 1.5, 3, 2, prompt_ids=(5, 6, 7), output_ids=(8, 9))],
    )
    del row["request_id"], row["timestamp" if "timestamp" in row else "arrival_time_ns"]
    assert next(iter(open_trace(write_jsonl(tmp_path / "bare.jsonl", row))))[:2] == ("1", 0.0)


@pytest.mark.parametrize(
    ("ids", "message"),
    [("5", "must be a list of token ids"), ([1, -1], "token ids are from 0"), ([1.0], "token ids are from 0")],
)
def test_token_ids_that_are_none(tmp_path, ids, message):
    row = {"prompt_token_ids": ids, "output_token_ids": [1]}
    with pytest.raises(TraceError, match=message):
        list(open_trace(write_jsonl(tmp_path / "trace.jsonl", row)))


def weka_request(t: float, *ids: int) -> dict[str, object]:
    return {"t": t, "type": "n", "in": 64 * len(ids) + 9, "out": 5, "hash_ids": list(ids)}


def write_weka(path: Path, *requests: object, scope: str = "local", indent: int | None = None) -> Path:
    document = {"id": path.stem, "block_size": 64, "hash_id_scope": scope, "requests": list(requests)}
    path.write_text(json.dumps(document, indent=indent))
    return path


def test_weka_flattens_sub_agents_in_time_order(tmp_path):
    inner = {"t": 1.0, "type": "subagent", "requests": [weka_request(0.0, 8), weka_request(1.5, 8, 9)]}
    agent = {"t": 2.0, "type": "subagent", "requests": [weka_request(0.0, 7), inner, weka_request(2.0, 7, 6)]}
    path = write_weka(tmp_path / "t.json", weka_request(0.0, 1, 2), agent, weka_request(4.2, 1, 2, 3), indent=1)
    trace = open_trace(path)
    requests = list(trace)
    assert trace.format == "weka"
    # Sub-agent times count from the sub-agent's start.
    assert [(r.request_id, r.arrival_s, len(r.hash_ids or ())) for r in requests] == [
        ("t/0", 0.0, 2),
        ("t/1", 2.0, 1),
        ("t/2", 3.0, 1),
        ("t/3", 4.0, 2),
        ("t/4", 4.2, 3),
        ("t/5", 4.5, 2),
    ]
    ids = [r.hash_ids for r in requests]
    assert ids[0] == ids[4][:2]
    assert ids[1] == ids[3][:1]
    assert ids[2] == ids[5][:1]


def test_weka_ids_are_distinct_between_conversations_unless_global(tmp_path):
    for scope in ("local", "global"):
        folder = tmp_path / scope
        folder.mkdir()
        for name in ("b", "a"):
            write_weka(folder / f"{name}.json", weka_request(0.0, 1, 2), weka_request(1.0, 1, 2, 3), scope=scope)
        trace = open_trace(folder)
        a, b = [], []
        for request in trace:
            (a if request.request_id.startswith("a") else b).extend(request.hash_ids)
        assert len(a) == len(b) == 5
        assert len(set(a)) == len(set(b)) == 3
        assert bool(set(a) & set(b)) is (scope == "global")
        assert trace.bytes_read == trace.num_bytes > 0


def test_generic_csv(tmp_path):
    path = tmp_path / "t"
    path.write_text('id,"prompt, len",gen_len,ts,pics,think\na,"100",20,1700000000.25,1,7\nb,300,40,1700000001.5,0,0\n')
    columns = {"input": "prompt, len", "output": "gen_len"}
    assert list(open_trace(path, columns=columns)) == [Request("2", 0.0, 100, 20), Request("3", 0.0, 300, 40)]
    columns |= {"arrival": "ts", "images": "pics", "reasoning": "think"}
    trace = open_trace(path, columns=columns, tokens_per_image=64)
    assert list(trace) == [Request("2", 0.0, 100, 20, 64, 7), Request("3", 1.25, 300, 40, 0, 0)]
    assert (trace.format, len(trace.notes)) == ("generic", 1)


def test_generic_json_lines_and_dates(tmp_path):
    rows = [{"i": 1, "o": 2, "at": "2024-05-10T00:00:00Z"}, {"i": 3, "o": 4, "at": "2024-05-10T00:00:02.5Z"}]
    columns = {"input": "i", "output": "o", "arrival": "at"}
    requests = list(open_trace(write_jsonl(tmp_path / "t", *rows), columns=columns))
    assert requests == [Request("1", 0.0, 1, 2), Request("2", 2.5, 3, 4)]


def test_columns_win_over_a_detected_format(tmp_path):
    path = tmp_path / "t"
    path.write_text(BURSTGPT_1)
    trace = open_trace(path, columns={"input": "Request tokens", "output": "Total tokens"})
    assert list(trace) == [Request("2", 0.0, 472, 490)]


def test_byte_order_mark_blank_lines_and_quotes_are_accepted(tmp_path):
    path = tmp_path / "t"
    text = '\r\n"TIMESTAMP","ContextTokens","GeneratedTokens"\r\n  \r\n"2023-11-16 18:17:03.97","7","8"\r\n\r\n'
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert list(open_trace(path)) == [Request("4", 0.0, 7, 8)]
    path.write_bytes(b"\xef\xbb\xbf\n" + json.dumps(mooncake_row(1, 600, 512, partial=True)).encode() + b"\r\n\r\n")
    assert [r.input_tokens for r in open_trace(path)] == [600]


def test_gzip_is_read_by_content(tmp_path):
    path = tmp_path / "plain-name"
    data = gzip.compress(AZURE_2023.encode())
    path.write_bytes(data)
    trace = open_trace(path)
    assert len(list(trace)) == 2
    assert trace.bytes_read == trace.num_bytes == len(data)


def test_bounds(tmp_path):
    path = write_jsonl(tmp_path / "t", *(mooncake_row(1000 * i, 600, 512, partial=True) for i in (0, 3, 1, 2)))
    assert [r.arrival_s for r in open_trace(path, num_requests=2)] == [0.0, 3.0]
    assert [r.arrival_s for r in open_trace(path, duration_s=2)] == [0.0, 1.0]
    assert [r.arrival_s for r in open_trace(path, duration_s=3, num_requests=2)] == [0.0, 1.0]
    with pytest.raises(TraceError, match=r"has no requests before 0\.001 s"):
        list(open_trace(write_jsonl(tmp_path / "u", mooncake_row(5, 600, 512, partial=True)), duration_s=0.001))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "sharegpt"}, "format is 'sharegpt', but must be one of mooncake, "),
        ({"format": "generic"}, "needs columns that name input and output"),
        ({"columns": {"input": "a"}}, "columns must name 'output'; it names input"),
        ({"columns": {}}, "columns must name 'input'; it names nothing"),
        ({"columns": {"input": "a", "output": "b", "inputs": "c"}}, "columns has 'inputs'"),
        ({"columns": {"input": "a", "output": "b"}, "format": "azure"}, "columns are for the format 'generic'"),
        ({"tokens_per_image": -1}, "tokens_per_image is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"num_requests": 0}, "num_requests is 0"),
        ({"duration_s": 0}, "duration_s is 0"),
        ({"duration_s": float("nan")}, "duration_s is nan"),
        ({"format": "demo"}, "takes the source 'demo'"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ConfigError, match=message):
        open_trace("somewhere", **arguments)


@pytest.mark.parametrize("packed", [False, True])
def test_memory_is_bounded_and_progress_moves(tmp_path, packed):
    path = tmp_path / "big"
    draws = random.Random(0)
    # More than a compressor's window of noise, so that a packed file is longer than what a reader buffers.
    noise = [draws.randbytes(2000).hex() for _ in range(20)]
    rows = [json.dumps(mooncake_row(3, 2_000, 512, partial=True) | {"type": text}) + "\n" for text in noise]
    with gzip.open(path, "wt", compresslevel=1) if packed else path.open("w") as file:
        for _ in range(10):
            file.write("".join(rows) * 50)  # 41 MB unpacked
    tracemalloc.start()
    try:
        trace = open_trace(path)
        positions = [trace.bytes_read for number, _ in enumerate(trace) if number % 1000 == 0]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert positions == sorted(positions)
    assert 0 < positions[0] < positions[-1] <= trace.bytes_read == trace.num_bytes
