"""The other end of `vllm_peer.py`: starts it under vLLM's Python and calls it, one line of JSON each way."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

WORKER = Path(__file__).with_name("vllm_peer.py")


class PeerError(Exception):
    """The peer could not be started, or has ended."""


class PeerProcess:
    """A running peer; a context manager that ends it. `PeerError` when it cannot start (no vLLM there, for example)."""

    def __init__(self, python: Path) -> None:
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `_end`
        try:
            self._process = subprocess.Popen(
                [python, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._complaints, text=True
            )
        except OSError as error:
            self._complaints.close()
            raise PeerError(f"{python} cannot be run: {error.strerror}") from None
        self.versions: dict[str, str] = self._receive()

    def call(self, name: str, **arguments: Any) -> Any:
        """What the peer's method returns."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"the vLLM peer has ended: {self._end()}")
        return json.loads(line)

    def _end(self) -> str:
        """Close everything; the last line that the peer has said on stderr."""
        # The end of its stdin ends it.
        self._process.communicate()
        self._complaints.seek(0)
        lines = self._complaints.read().strip().splitlines() or ["no message"]
        self._complaints.close()
        return lines[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._complaints.closed:
            self._end()
