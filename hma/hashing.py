"""Block keys: a keyed chain hash over token ids, so that equal keys mean equal prefixes.

A key is 16 bytes of BLAKE2b over everything from the start of the sequence to the end of its block: the namespace
(layout, model, salt, adapter), then the token ids as little-endian int32, whatever integer type they came in.
Multimodal items enter before the block in which they start. Token ids are never negative, so the marker -1 in front of
an item cannot be confused with a token.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Container, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache.errors import ConfigError

KEY_BYTES = 16
# Base blocks that are looked up as one.
SPAN = 32
MAX_TOKEN_ID = 2**31 - 1


class Item(NamedTuple):
    """A multimodal item: the position of its first token, and a digest of its content."""

    position: int
    digest: bytes


def as_token_bytes(token_ids: npt.ArrayLike) -> bytes:
    """Token ids as little-endian int32; `ConfigError` unless they are whole numbers from 0 to 2**31 - 1."""
    return as_tokens(token_ids).tobytes()


def as_tokens(token_ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """The same as an array, which may be the one given."""
    ids = _from_list(token_ids) if isinstance(token_ids, list) else np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ConfigError(f"token ids must be one row of whole numbers, not {ids.dtype} of shape {ids.shape}")
    if ids.size and (ids.min() < 0 or (ids.dtype != np.int32 and ids.max() > MAX_TOKEN_ID)):
        raise ConfigError(f"token ids must be from 0 to {MAX_TOKEN_ID}; found {int(ids.min())} to {int(ids.max())}")
    tokens: npt.NDArray[np.int32] = ids.astype("<i4", copy=False)
    return tokens


def _from_list(token_ids: list[Any]) -> npt.NDArray[Any]:
    """Lists are what engines have; struct reads them three times as fast as numpy does, and only whole numbers."""
    if not token_ids or isinstance(token_ids[0], bool):
        return np.asarray(token_ids)  # a row of truth values is not one of whole numbers
    try:
        return np.frombuffer(struct.pack(f"<{len(token_ids)}i", *token_ids), dtype="<i4")
    except struct.error:
        return np.asarray(token_ids)


@lru_cache(maxsize=1024)
def namespace(*parts: str | bytes) -> bytes:
    """One digest of what separates caches: length-framed, so that no two lists of parts collide."""
    digest = blake2b(digest_size=32, person=b"kvtide-namespace")
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


class KeyChain:
    """The keys of one sequence. `keys[i]` covers tokens `[0, (i + 1) * block_size)`.

    A prompt is hashed when it is looked up: whole spans at a time while their last keys are known, block by block from
    there on. The keys inside the spans that were skipped are made only if somebody asks for them.
    """

    __slots__ = ("_block_bytes", "_digest", "_is_hashed", "_keys", "_pending", "_prompt", "_space", "span_keys")

    def __init__(self, block_size: int, space: bytes, prompt: bytes = b"", items: Sequence[Item] = ()) -> None:
        self._block_bytes = 4 * block_size
        self._space = space
        self._digest = self._start()
        self._prompt = prompt
        self._is_hashed = not prompt
        self._pending = deque(items)
        self._keys: list[bytes] = []
        # Last keys of the spans at the start whose other keys have not been made.
        self.span_keys: list[bytes] = []

    @property
    def keys(self) -> list[bytes]:
        """Keys of all whole blocks."""
        return self.between(0, None)

    def between(self, begin: int, end: int | None) -> list[bytes]:
        """The keys with numbers from `begin` to `end`."""
        if not self._is_hashed:
            self.hash_prompt()
        skipped = len(self.span_keys) * SPAN
        if begin < skipped:
            rest, self._keys = self._keys, []
            tail, self._digest = self._digest, self._start()
            self.extend(self._prompt[: skipped * self._block_bytes])
            self._keys += rest
            self._digest, self._prompt, self.span_keys, skipped = tail, b"", [], 0
        return self._keys[begin - skipped : None if end is None else end - skipped]

    def hash_prompt(self, known: Container[bytes] = (), most: int = 0) -> None:
        """Hash the prompt unless that has been done.

        `known` holds the last keys of spans that may be skipped, as long as they lie in the first `most` blocks.
        """
        if self._is_hashed:
            return
        self._is_hashed = True
        size, prompt, start = SPAN * self._block_bytes, memoryview(self._prompt), 0
        end = min(most * self._block_bytes, len(prompt))
        while not self._pending and start + size <= end:
            ahead = self._digest.copy()
            ahead.update(prompt[start : start + size])
            key = ahead.digest()
            if key not in known:
                break
            self._digest = ahead
            self.span_keys.append(key)
            start += size
        if not start:
            self._prompt = b""
        self.extend(prompt[start:])

    def extend(self, tokens: bytes | memoryview) -> None:
        """Add the whole blocks of `tokens` (bytes of int32; a partial block at the end is left out)."""
        size = self._block_bytes
        start = 0
        while self._pending and start + size <= len(tokens):
            self.add_block(tokens[start : start + size])
            start += size
        # Most prompts have no items: a loop without the check for them, and without a call, is twice as fast.
        update, digest, append = self._digest.update, self._digest.digest, self._keys.append
        for begin in range(start, len(tokens) - size + 1, size):
            update(tokens[begin : begin + size])
            append(digest())

    def add_block(self, tokens: bytes | memoryview) -> None:
        """Add one block, and the items that start in it."""
        digest, pending = self._digest, self._pending
        while pending and pending[0].position * 4 < (len(self._keys) + 1) * self._block_bytes:
            position, content = pending.popleft()
            digest.update(np.array([-1, position, len(content)], dtype="<i4").tobytes())
            digest.update(content)
        digest.update(tokens)
        self._keys.append(digest.digest())

    def _start(self) -> blake2b:
        return blake2b(self._space, digest_size=KEY_BYTES, person=b"kvtide-block-key")
