"""The value format, version 1: a fixed header of 96 bytes, then the payload. All integers little-endian.

    offset  bytes  field
         0      4  magic "KVTV"
         4      2  version, 1
         6      2  codec: 0 raw bytes; others are registered in `codecs`
         8      8  raw_bytes: length of the value as the reader gets it
        16      8  stored_bytes: length of the payload
        24      8  generation: the writer's, so that a reader can tell a rewritten value from the one it looked up
        32     32  key
        64     16  XXH3-128 of the payload
        80      8  reserved, 0
        88      8  XXH3-64 of bytes 0 to 87

Whoever reads a value checks all of it, every time: `parse_header` refuses what is no header of this key, `verify`
what is not its payload. Lengths are bounded before anything is allocated. Nothing is ever unpickled.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from .keys import KEY_BYTES, StoreKey

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAGIC = b"KVTV"
VERSION = 1
CODEC_RAW = 0

_FIELDS = struct.Struct(f"<4sHHQQQ{KEY_BYTES}s16sQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECK.size


class BadValue(Exception):
    """Bytes that are not the value asked for; the text names the kind of fault in a word or two, for counters."""


class Header(NamedTuple):
    """A value's header, already checked.

    `codec` is the codec's number, `raw_bytes` the value's length, `stored_bytes` its payload's, `generation` the
    writer's number, `key` 32 bytes, `payload_digest` 16.
    """

    codec: int
    raw_bytes: int
    stored_bytes: int
    generation: int
    key: StoreKey
    payload_digest: bytes


def make_header(
    key: StoreKey, payload: ReadableBuffer, *, raw_bytes: int, codec: int = CODEC_RAW, generation: int = 0
) -> bytes:
    """The header, 96 bytes, of a payload that is about to be stored under `key`.

    `raw_bytes` is the value's length before codec number `codec` packed it; `generation` is the writer's own.
    """
    digest = xxhash.xxh3_128_digest(payload)
    return pack_header(Header(codec, raw_bytes, memoryview(payload).nbytes, generation, key, digest))


def pack_header(header: Header) -> bytes:
    """A header's bytes, for a store that has taken the payload's digest (`xxhash.xxh3_128`) piece by piece."""
    codec, raw_bytes, stored_bytes, generation, key, digest = header
    fields = _FIELDS.pack(MAGIC, VERSION, codec, raw_bytes, stored_bytes, generation, key, digest, 0)
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def parse_header(data: ReadableBuffer, key: StoreKey | None, *, max_value_bytes: int) -> Header:
    """The header at the start of `data`; `BadValue` unless it is whole, of this key (if given), and within bounds."""
    view = memoryview(data).cast("B")
    if len(view) < HEADER_BYTES:
        raise BadValue("short header")
    fields = view[: _FIELDS.size]
    magic, version, codec, raw_bytes, stored_bytes, generation, found_key, digest, _ = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise BadValue("no magic")
    if _CHECK.unpack(view[_FIELDS.size : HEADER_BYTES])[0] != xxhash.xxh3_64_intdigest(fields):
        raise BadValue("header checksum")
    if version != VERSION:
        raise BadValue("unknown version")
    if key is not None and found_key != key:
        raise BadValue("foreign key")
    if raw_bytes > max_value_bytes or stored_bytes > 2 * max_value_bytes:
        raise BadValue("length out of bounds")
    if codec == CODEC_RAW and raw_bytes != stored_bytes:
        raise BadValue("lengths differ")
    return Header(codec, raw_bytes, stored_bytes, generation, found_key, digest)


def verify(header: Header, payload: ReadableBuffer) -> None:
    """`BadValue` unless `payload` is, in length and checksum, what `header` was made for."""
    if memoryview(payload).nbytes != header.stored_bytes:
        raise BadValue("short payload")
    if xxhash.xxh3_128_digest(payload) != header.payload_digest:
        raise BadValue("payload checksum")
