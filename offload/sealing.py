"""From a caller's buffer to what a tier keeps, and back: the two calls between which every store's bytes lie.

    put   header, payload = seal(key, buffer, codec)         write both, header first
    get   header = parse_header(bytes read, key, ...)        `values`
          place = landing(header, buffer)                    where to read the payload: the buffer itself if it is raw
          unseal(header, place, buffer)                      checked, then unpacked where it must be; or `BadValue`

A raw value is never copied here: it is written from the caller's buffer and read into it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .codecs import Codec, codec_numbered
from .keys import StoreKey
from .values import CODEC_RAW, BadValue, Header, make_header, verify

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def seal(
    key: StoreKey, buffer: ReadableBuffer, codec: Codec | None = None, generation: int = 0
) -> tuple[bytes, memoryview]:
    """The header (96 bytes) and the payload of the value in `buffer`, to be stored under `key`.

    The payload is a view of `buffer`, unless `codec` makes it smaller. `generation` is the writer's own number.
    """
    raw = memoryview(buffer).cast("B")
    if codec is not None and raw.nbytes:
        payload = codec.encode(raw)
        if payload is not None and payload.nbytes < raw.nbytes:
            header = make_header(key, payload, raw_bytes=raw.nbytes, codec=codec.number, generation=generation)
            return header, payload
    return make_header(key, raw, raw_bytes=raw.nbytes, generation=generation), raw


def landing(header: Header, out: memoryview) -> memoryview:
    """Where the payload is to be read to: `out`, or memory of its own; `BadValue` if the value has another length.

    `out` is the caller's buffer as bytes. The memory is bounded: `parse_header` has checked the lengths.
    """
    if header.raw_bytes != out.nbytes:
        raise BadValue("length differs")
    return out if header.codec == CODEC_RAW else memoryview(bytearray(header.stored_bytes))


def unseal(header: Header, payload: memoryview, out: memoryview) -> None:
    """Check a payload that was read to its `landing`, or lies anywhere, and leave the value in `out`, or `BadValue`."""
    if header.raw_bytes != out.nbytes:
        raise BadValue("length differs")
    verify(header, payload)
    if header.codec != CODEC_RAW:
        codec_numbered(header.codec).decode(payload, out)
    elif payload is not out:
        out[:] = payload
