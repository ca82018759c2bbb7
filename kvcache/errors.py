"""The error tree. Everything kvtide raises on purpose is a `KvtideError` whose text is one sentence.

A message names the thing, its value, and what is allowed; the command line prints it as it is and exits with 2.
"""

from __future__ import annotations


class KvtideError(Exception):
    """Base of every error that kvtide raises on purpose."""


class ConfigError(KvtideError):
    """A model config, layout, geometry or argument that cannot be used as given."""


class TraceError(KvtideError):
    """A serving trace that cannot be read; the message names the file and the line."""


class MissingExtra(KvtideError):
    """A part that needs an optional package which is not installed."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs the package {package!r}; install it with: pip install 'kvtide[{extra}]'")
