"""Strategies that start from what is right and break it: edited bytes, edited JSON values, and wholly random ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

Edit = tuple[str, int, int, bytes]

# Stands for a number of more digits than Python writes or reads at once.
HUGE = "5000 digits"
# Where readers of numbers, texts and lengths go wrong.
EDGES: list[Any] = [
    *(0, 1, -1, 2, 7, 16, 255, 4096, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")),
    *(
        HUGE,
        None,
        True,
        False,
        "",
        " ",
        "0",
        "-1",
        "1e9",
        "nan",
        "auto",
        "none",
        "true",
        "null",
        "²",
        "٣",
        "\0",
        "\ud800",
        "é" * 50,
    ),
    *(
        "x" * 5000,
        "[" * 3000,
        "{" * 3000,
        "64GiB",
        "0GiB",
        "1e9GiB",
        "../..",
        "/",
        "\n",
        "a\nb",
        "%s",
        "[red]x[/]",
        "${HOME}",
    ),
    *([], {}, [[]], [{}], {"": None}, [None] * 3, {"type": "x"}, list(range(50)), [0] * 500),
]

edges = st.sampled_from(EDGES)
values: st.SearchStrategy[Any] = st.recursive(
    edges | st.integers(-5, 5000) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=6,
)
places = st.integers(0, 2**32)


def edited_bytes(seeds: Sequence[bytes], most: int = 5) -> st.SearchStrategy[bytes]:
    """One of the seeds after a few edits: bits flipped, bytes set, cut out, put in, repeated, cut off."""
    kinds = st.sampled_from(["flip", "set", "cut", "insert", "repeat", "truncate", "splice"])
    tokens = st.sampled_from([b"\0", b"\xff", b"\n", b'"', b"{", b"}", b"[", b",", b":", b"-", b"\xff" * 8, b"\0" * 8])
    edit = st.tuples(kinds, places, places, tokens | st.binary(max_size=8))
    return st.builds(_edit_bytes, st.sampled_from(seeds), st.lists(edit, max_size=most), st.sampled_from(seeds))


def _edit_bytes(seed: bytes, edits: list[Edit], other: bytes) -> bytes:
    data = bytearray(seed)
    for kind, first, second, token in edits:
        at = first % (len(data) + 1)
        length = 1 + second % 64
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << second % 8
        elif kind == "set":
            data[at : at + len(token)] = token
        elif kind == "cut":
            del data[at : at + length]
        elif kind == "insert":
            data[at:at] = token
        elif kind == "repeat":
            data[at:at] = data[at : at + length] * (1 + second % 4)
        elif kind == "truncate":
            del data[at:]
        elif kind == "splice" and other:
            start = second % len(other)
            data[at:at] = other[start : start + length]
    return bytes(data)


def edited_json(seeds: Sequence[Any], names: Sequence[str] = (), most: int = 4) -> st.SearchStrategy[Any]:
    """One of the seeds after a few edits of its values: replaced, removed, doubled, renamed, and some put in.

    `names` are keys that mean something to the reader.
    """
    kinds = st.sampled_from(["replace", "replace", "replace", "remove", "double", "rename", "add"])
    known = sorted({*names, *(key for seed in seeds for key in _keys(seed))})
    edit = st.tuples(kinds, places, st.sampled_from(known) | st.text(max_size=8), values)
    return st.builds(_edit_json, st.sampled_from(seeds), st.lists(edit, min_size=1, max_size=most))


def random_json(names: Sequence[str]) -> st.SearchStrategy[dict[str, Any]]:
    """An object of known keys and anything behind them."""
    return st.dictionaries(st.sampled_from(sorted(names)) | st.text(max_size=6), values, max_size=12)


def as_text(value: Any) -> str:
    """JSON text, also of what JSON has no word for."""
    return json.dumps(value).replace(f'"{HUGE}"', "1" + "0" * 5000)


def _edit_json(seed: Any, edits: list[tuple[str, int, str, Any]]) -> Any:
    root = [deepcopy(seed)]
    for kind, place, name, value in edits:
        value = deepcopy(value)  # strategies hand out the same object again
        spots = list(_spots(root))
        holder, key = spots[place % len(spots)]
        inner = holder[key]
        if kind == "replace" or (kind == "remove" and holder is root):
            holder[key] = value
        elif kind == "remove":
            del holder[key]
        elif kind == "double" and isinstance(holder, list) and holder is not root:
            holder.insert(key, deepcopy(inner))
        elif kind == "rename" and isinstance(holder, dict):
            holder[name] = holder.pop(key)
        elif isinstance(inner, dict):
            inner[name] = value
        elif isinstance(inner, list):
            inner.append(value)
    return root[0]


def _spots(value: Any) -> Any:
    """Every place `(container, key)` in a value, the outer ones first."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
    for inner in list(value.values()) if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from _spots(inner)


def _keys(value: Any) -> Any:
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _keys(inner)
