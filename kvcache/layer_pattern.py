"""The one-line notation for the layers of a model: `10*(5*local, full), 2*local`.

An entry is a label, `@label` (a layer that stores nothing and reads the KV of the last earlier layer with that label),
`none` (stores and reads nothing), or a pattern in parentheses; `n*` repeats the entry that follows. `expand` turns the
text into one word per layer; what the labels mean is up to `yaml_layout`.
"""

from __future__ import annotations

import re

from .config_fields import MAX_LAYERS
from .documents import shown
from .errors import ConfigError

_TOKEN = re.compile(r"\s*(?:(?P<count>\d+)\s*\*|(?P<word>@?[A-Za-z_][\w.-]*)|(?P<sign>[(),]))")
_MAX_DEPTH = 16


def expand(pattern: str, key: str) -> tuple[str, ...]:
    """One word per layer; `ConfigError` (naming `key`) for text that is not a pattern or gives too many layers."""
    tokens, position = [], 0
    text = pattern.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _bad(key, pattern, f"{shown(text[position:].strip())} is not expected")
        tokens.append((match.lastgroup or "", match[match.lastgroup or 0]))
        position = match.end()
    words, rest = _sequence(tokens, 0, key, pattern)
    if rest != len(tokens):
        raise _bad(key, pattern, "a parenthesis closes that was never opened")
    return tuple(words)


def _sequence(tokens: list[tuple[str, str]], depth: int, key: str, pattern: str, at: int = 0) -> tuple[list[str], int]:
    """The words of entries separated by commas, from token `at` to a closing parenthesis or the end."""
    if depth > _MAX_DEPTH:
        raise _bad(key, pattern, f"parentheses are nested deeper than {_MAX_DEPTH}")
    words: list[str] = []
    while True:
        count = 1
        if at < len(tokens) and tokens[at][0] == "count":
            digits = tokens[at][1]
            count = int(digits) if len(digits) <= 6 else MAX_LAYERS + 1
            at += 1
        if at < len(tokens) and tokens[at] == ("sign", "("):
            entry, at = _sequence(tokens, depth + 1, key, pattern, at + 1)
            if at == len(tokens):
                raise _bad(key, pattern, "a parenthesis is not closed")
        elif at < len(tokens) and tokens[at][0] == "word":
            entry = [tokens[at][1]]
        else:
            raise _bad(key, pattern, "a label or a parenthesis is missing")
        at += 1
        if count < 1 or len(words) + count * len(entry) > MAX_LAYERS:
            raise _bad(key, pattern, f"it must give 1 to {MAX_LAYERS} layers")
        words += entry * count
        if at == len(tokens) or tokens[at] == ("sign", ")"):
            return words, at
        if tokens[at] != ("sign", ","):
            raise _bad(key, pattern, f"a comma is missing before {shown(tokens[at][1])}")
        at += 1


def _bad(key: str, pattern: str, reason: str) -> ConfigError:
    return ConfigError(f"{key} is {shown(pattern)}: {reason} (a pattern looks like '10*(5*local, full), 2*local')")
