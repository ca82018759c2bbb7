"""The error tree. Everything kvtide raises on purpose is a `KvtideError` whose text is one sentence.

A message names the thing, its value, and what is allowed; the command line prints it as it is and exits with 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


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


class BackendUnavailable(KvtideError):
    """A kernel backend that was asked for and cannot run the call; the message gives every reason."""


class Exhausted(KvtideError):
    """A reservation that does not fit; nothing was changed.

    `shortfall` maps group names to blocks that the group's own pages cannot give; `pages_short` is how many pages are
    missing in all.
    """

    def __init__(
        self,
        message: str,
        shortfall: Mapping[str, int] | None = None,
        pages_short: int = 0,
        would_free: Callable[[], dict[int, dict[str, int]]] = dict,
    ) -> None:
        super().__init__(message)
        self.shortfall = dict(shortfall or {})
        self.pages_short = pages_short
        self._would_free = would_free

    @property
    def would_free(self) -> dict[int, dict[str, int]]:
        """Per running row, the blocks of each group that preempting it would give back.

        Looked up when asked for, so ask before the manager's next call.
        """
        return self._would_free()
