"""Block keys: a keyed chain hash over token ids, so that equal keys mean equal prefixes.

A key is 16 bytes of BLAKE2b over everything from the start of the sequence to the end of its block: the namespace
(layout, model, salt, adapter), then the token ids as little-endian int32, whatever integer type they came in.
Multimodal items enter before the block in which they start. Token ids are never negative, so the marker -1 in front of
an item cannot be confused with a token.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache.errors import ConfigError

KEY_BYTES = 16
MAX_TOKEN_ID = 2**31 - 1


class Item(NamedTuple):
    """A multimodal item: the position of its first token, and a digest of its content."""

    position: int
    digest: bytes


def as_token_bytes(token_ids: npt.ArrayLike) -> bytes:
    """Token ids as little-endian int32; `ConfigError` unless they are whole numbers from 0 to 2**31 - 1."""
    # Lists are what engines have; array reads them twice as fast as numpy does, and takes nothing but whole numbers.
    ids = _from_list(token_ids) if isinstance(token_ids, list) else np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ConfigError(f"token ids must be one row of whole numbers, not {ids.dtype} of shape {ids.shape}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID):
        raise ConfigError(f"token ids must be from 0 to {MAX_TOKEN_ID}; found {int(ids.min())} to {int(ids.max())}")
    return ids.astype("<i4").tobytes()


def _from_list(token_ids: list[Any]) -> npt.NDArray[Any]:
    if not token_ids or isinstance(token_ids[0], bool):
        return np.asarray(token_ids)  # a row of truth values is not one of whole numbers
    try:
        return np.frombuffer(array("i", token_ids), dtype=np.intc)
    except (TypeError, OverflowError):
        return np.asarray(token_ids)


def namespace(*parts: str | bytes) -> bytes:
    """One digest of what separates caches: length-framed, so that no two lists of parts collide."""
    digest = blake2b(digest_size=32, person=b"kvtide-namespace")
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


class KeyChain:
    """The keys of one sequence, extended block by block. `keys[i]` covers tokens `[0, (i + 1) * block_size)`."""

    __slots__ = ("_block_bytes", "_digest", "_pending", "keys")

    def __init__(self, block_size: int, space: bytes) -> None:
        self._block_bytes = 4 * block_size
        self._digest = blake2b(space, digest_size=KEY_BYTES, person=b"kvtide-block-key")
        self._pending: deque[Item] = deque()
        self.keys: list[bytes] = []

    def extend(self, tokens: bytes, items: Sequence[Item] = ()) -> None:
        """Add the whole blocks of `tokens` (bytes of int32; a partial block at the end is left out).

        `items` are sorted by position; each enters the chain before the block in which it starts, which may come later.
        """
        size = self._block_bytes
        self._pending.extend(items)
        start = 0
        while self._pending and start + size <= len(tokens):
            self.add_block(tokens[start : start + size])
            start += size
        # Most prompts have no items: a loop without the check for them, and without a call, is twice as fast.
        update, copy, append = self._digest.update, self._digest.copy, self.keys.append
        for begin in range(start, len(tokens) - size + 1, size):
            update(tokens[begin : begin + size])
            append(copy().digest())

    def add_block(self, tokens: bytes) -> None:
        """Add one block, and the items that start in it."""
        pending = self._pending
        while pending and pending[0].position * 4 < (len(self.keys) + 1) * self._block_bytes:
            position, content = pending.popleft()
            self._digest.update(np.array([-1, position, len(content)], dtype="<i4").tobytes())
            self._digest.update(content)
        self._digest.update(tokens)
        self.keys.append(self._digest.copy().digest())
