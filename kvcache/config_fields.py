"""`Fields`: reading a model config key by key, with the origin of every value that decided something.

A key can be absent, null, or carry a value, and the three mean different things (an absent `sliding_window` is the
model class's default, null is "none"); each reader below says which of them it accepts. What a reader returns is
recorded as a `Source`; a bad value is a `ConfigError` that names the key, the value, and what is allowed. The family
rules in `families` and `recurrent_families` see configs only through this class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .documents import shown
from .errors import ConfigError
from .layout import Source

MAX_LAYERS = 10_000
_MAX_NUMBER = 2**31 - 1
_ABSENT = object()


class Fields:
    """One object of a config file, read by typed getters.

    `place` prefixes origins (`config.json`), `path` the keys (`text_config.`). `defaults` are the values that the
    model class named `class_name` assumes for absent keys; a default of None means that the class derives the value.
    `file_keys` gives the file's own name of a key where it differs from the one that rules use.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        place: str,
        path: str = "",
        class_name: str = "",
        defaults: Mapping[str, int | None] | None = None,
        file_keys: Mapping[str, str] | None = None,
    ) -> None:
        self.data = data
        self.place = place
        self.path = path
        self.class_name = class_name
        self.defaults = defaults or {}
        self._file_keys = file_keys or {}
        self.notes: list[str] = []
        self._sources: dict[str, Source] = {}

    @property
    def sources(self) -> tuple[Source, ...]:
        """What has been read so far, in that order."""
        return tuple(self._sources.values())

    def note(self, text: str) -> None:
        """Tell the reader of the layout something; the same text twice is told once."""
        if text not in self.notes:
            self.notes.append(text)

    def record(self, field: str, value: object, origin: str) -> None:
        """Add a source that no getter added: a derived value or one from outside this object."""
        self._sources[field] = Source(field, str(value), origin)

    def key(self, name: str) -> str:
        """The full name of a key, for messages."""
        return f"{self.path}{self._file_keys.get(name, name)}"

    def has(self, name: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self.data.get(name) is not None

    def bad(self, name: str, allowed: str, value: object = _ABSENT) -> ConfigError:
        """The error for a bad value (by default the key's own)."""
        value = self.data.get(name) if value is _ABSENT else value
        return ConfigError(f"{self.key(name)} is {shown(value)}; it must be {allowed}")

    def integer(self, *names: str, minimum: int = 1, maximum: int = _MAX_NUMBER, field: str = "") -> int:
        """The whole number under the first of `names` that is not null, or the class default; else an error."""
        value = self.optional_integer(*names, minimum=minimum, maximum=maximum, field=field)
        if value is None:
            raise ConfigError(f"{self.key(names[0])} is missing; it must be a whole number of at least {minimum}")
        return value

    def optional_integer(
        self, *names: str, minimum: int = 1, maximum: int = _MAX_NUMBER, field: str = ""
    ) -> int | None:
        """Like `integer`, with None for "no such key and no class default" and for null under every name."""
        for name in names:
            value = self.data.get(name)
            if value is not None:
                number = self._whole(name, value, minimum, maximum)
                self.record(field or names[0], number, f"{self.place}: {self.key(name)}")
                return number
        if any(name in self.data for name in names):
            return None
        for name in names:
            value = self.defaults.get(name)
            if value is not None:
                number = self._whole(name, value, minimum, maximum)
                self.record(field or names[0], number, f"class default of {self.class_name}")
                return number
        return None

    def nullable_integer(self, name: str) -> int | None:
        """A whole number of at least 1, or None when the key is null, or the class default when it is absent."""
        value = self.optional_integer(name)
        if value is None and name in self.data:
            self.record(name, "null", f"{self.place}: {self.key(name)}")
        return value

    def flag(self, name: str) -> bool:
        """A boolean; absent and null are false."""
        value = self.data.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.bad(name, "true or false")
        self.record(name, str(value).lower(), f"{self.place}: {self.key(name)}")
        return value

    def text(self, name: str) -> str | None:
        """A string, or None when absent or null; not recorded."""
        value = self.data.get(name)
        if value is not None and not isinstance(value, str):
            raise self.bad(name, "text")
        return value

    def nested(self, name: str) -> Fields | None:
        """The object under `name` (None when absent or null), recording into this one's sources and notes."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.bad(name, "an object")
        inner = Fields(value, self.place, f"{self.key(name)}.")
        inner.notes, inner._sources = self.notes, self._sources
        return inner

    def names(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, or None when absent or null."""
        return self._list(name, "a list of names", lambda item: isinstance(item, str))

    def integers(self, name: str, minimum: int, maximum: int) -> tuple[int, ...] | None:
        """A list of whole numbers between `minimum` and `maximum`, or None when absent or null."""
        allowed = f"a list of whole numbers from {minimum} to {maximum}"
        return self._list(name, allowed, lambda item: type(item) is int and minimum <= item <= maximum)

    def windows(self, name: str) -> tuple[int | None, ...] | None:
        """A list of window sizes where null is full attention; None when the key holds anything but a list."""
        if not isinstance(self.data.get(name), list):
            return None
        values = self._list(
            name,
            "a list of nulls and whole numbers of at least 1",
            lambda item: item is None or (type(item) is int and 1 <= item <= _MAX_NUMBER),
        )
        if not values:
            raise self.bad(name, "a list that is not empty")
        return values

    def _list(self, name: str, allowed: str, accept: Callable[[Any], bool]) -> tuple[Any, ...] | None:
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self.bad(name, allowed)
        if len(value) > 2 * MAX_LAYERS:
            raise self.bad(name, f"a list of at most {2 * MAX_LAYERS} entries")
        for index, item in enumerate(value):
            if not accept(item):
                raise ConfigError(f"{self.key(name)}[{index}] is {shown(item)}; it must be {allowed}")
        self.record(name, summary(value), f"{self.place}: {self.key(name)}")
        return tuple(value)

    def _whole(self, name: str, value: object, minimum: int, maximum: int) -> int:
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.bad(name, f"a whole number from {minimum} to {maximum}", value)
        return value


def summary(values: Sequence[object]) -> str:
    """A per-layer list in a few words: how often each value occurs."""
    counts = Counter("null" if value is None else str(value) for value in values)
    return ", ".join(f"{count} × {value}" for value, count in counts.items()) or "empty"
