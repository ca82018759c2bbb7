"""Checks of single values, shared by all readers: token counts, times, prefix blocks.

A check takes the value, the name that the trace gives it, and the place (a file at a line) that words the error; it
returns the value in its final type or raises `TraceError`. Lengths are whole numbers from 0 to 2**40 tokens, times are
finite seconds from 0 to 2**40. The good case costs one call and a comparison or two, for traces have millions of rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from functools import lru_cache
from typing import Any, Protocol

from kvtide.kvcache import TraceError

from .tracefile import show

MAX_TOKENS = 1 << 40
MAX_SECONDS = float(1 << 40)
MAX_HASH_ID = (1 << 63) - 1

_CLOCK = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d+))?\s*(?:Z|([+-])(\d\d):?(\d\d))?",
    re.ASCII,
)


class Place(Protocol):
    """Where in a trace a value stands."""

    def error(self, what: str) -> TraceError:
        """Return the error that says `what` is wrong here."""


def value_of(row: Mapping[str, Any], key: str, place: Place) -> Any:
    """Return `row[key]`, or raise the error that names the missing key and those present."""
    try:
        return row[key]
    except KeyError:
        raise place.error(f"has no key {key!r}; its keys are {show(list(row))}") from None


def count(value: object, name: str, place: Place) -> int:
    """Return a JSON number of tokens."""
    if type(value) is int and 0 <= value <= MAX_TOKENS:
        return value
    raise place.error(f"{name} is {show(value)}, but must be a whole number from 0 to 2**40")


def count_text(text: str, name: str, place: Place) -> int:
    """Return a number of tokens written as text."""
    digits = text.strip()
    if digits.isdecimal() and digits.isascii() and len(digits) <= 20 and (value := int(digits)) <= MAX_TOKENS:
        return value
    raise place.error(f"{name} is {show(text)}, but must be a whole number from 0 to 2**40")


def seconds(value: object, name: str, place: Place) -> float:
    """Return a JSON number of seconds or milliseconds as a float in the same unit."""
    if type(value) in (int, float) and 0 <= value <= MAX_SECONDS:  # type: ignore[operator]  # NaN compares false
        return float(value)  # type: ignore[arg-type]
    raise place.error(f"{name} is {show(value)}, but must be a finite number from 0 to 2**40")


def seconds_text(text: str, name: str, place: Place) -> float:
    """Return a number of seconds written as text."""
    try:
        value = float(text) if "_" not in text else -1.0  # float("1_0") is 10 in Python, but in no trace
    except ValueError:
        value = -1.0
    if 0 <= value <= MAX_SECONDS:
        return value
    raise place.error(f"{name} is {show(text)}, but must be a finite number from 0 to 2**40")


@lru_cache(maxsize=64)
def _seconds_at(day: str) -> int:
    return date.fromisoformat(day).toordinal() * 86400


def clock_ns(text: str, name: str, place: Place) -> int:
    """Return the nanoseconds of a date and time of day since year 1; without a time zone it is UTC."""
    match = _CLOCK.fullmatch(text.strip())
    if match is not None:
        day, hour, minute, second, fraction, sign, zone_hour, zone_minute = match.groups()
        try:
            whole = _seconds_at(day) + int(hour) * 3600 + int(minute) * 60 + int(second)
        except ValueError:  # no such day
            pass
        else:
            if sign:
                offset = int(zone_hour) * 3600 + int(zone_minute) * 60
                whole += offset if sign == "-" else -offset
            if hour < "24" and minute < "60" and second <= "60":
                return whole * 1_000_000_000 + (int(fraction[:9].ljust(9, "0")) if fraction else 0)
    raise place.error(f"{name} is {show(text)}, but must be a time like 2023-11-16 18:17:03.9799600")


def prefix_blocks(value: object, input_tokens: int, block: int, place: Place) -> tuple[int, ...]:
    """Return the ids of a prompt's prefix blocks; fewer than the prompt has are fine, more are an error."""
    if type(value) is not list or not set(map(type, value)) <= {int}:
        raise place.error(f"hash_ids is {show(value)}, but must be a list of whole numbers")
    if len(value) > -(-input_tokens // block):
        raise place.error(
            f"hash_ids names {len(value)} blocks of {block} tokens, but the prompt of {input_tokens} tokens has only "
            f"{-(-input_tokens // block)}"
        )
    if value and not (min(value) >= 0 and max(value) <= MAX_HASH_ID):
        raise place.error(f"hash_ids holds {show(_first_outside(value))}, but ids go from 0 to 2**63 - 1")
    return tuple(value)


def _first_outside(ids: Sequence[int]) -> int:
    return next(i for i in ids if not 0 <= i <= MAX_HASH_ID)
