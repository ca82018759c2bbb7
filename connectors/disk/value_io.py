"""Values in files: read and checked, or written, at an offset, with the caller's buffer as the only memory.

Long raw values go piece by piece, each hashed while it is in the processor's cache for the copy, so that checksums cost
no second way through memory. Their header is written last; it is read with the first piece.
"""

from __future__ import annotations

import xxhash

from kvtide.offload.keys import StoreKey
from kvtide.offload.sealing import landing, unseal
from kvtide.offload.values import CODEC_RAW, HEADER_BYTES, BadValue, Header, pack_header, parse_header

from .files import PAGE, Bytes, read_all, write_all

_PIECE = 1 << 19
_ZEROS = bytes(PAGE)


def read_value(
    fd: int, offset: int, stored_bytes: int, key: StoreKey, view: memoryview, max_value_bytes: int
) -> Header:
    """Read the value at `offset`, check it, and leave it in `view`; `BadValue` if it is not the value of the key."""
    start = bytearray(HEADER_BYTES)
    first = view[:_PIECE] if stored_bytes == view.nbytes else view[:0]
    read = read_all(fd, (start, first), offset)
    header = parse_header(start, key, max_value_bytes=max_value_bytes)
    if header.stored_bytes != stored_bytes:
        raise BadValue("length differs")
    if header.codec == CODEC_RAW and stored_bytes == view.nbytes:
        _check_raw(fd, offset + HEADER_BYTES, header, view, read - HEADER_BYTES)
        return header
    place = landing(header, view)
    if read_all(fd, (place,), offset + HEADER_BYTES) != place.nbytes:
        raise BadValue("short payload")
    unseal(header, place, view)
    return header


def write_value(fd: int, offset: int, header: Bytes, payload: Bytes) -> None:
    """Write a value, to the end of its last page so that no page must be read first."""
    padding = _ZEROS[: -(len(header) + len(payload)) % PAGE]
    write_all(fd, (header, payload, padding), offset)


def write_raw(fd: int, offset: int, key: StoreKey, view: memoryview, generation: int, *, pad: bool) -> None:
    """Write a raw value, making its header on the way; `pad` as `write_value` does."""
    size = len(view)
    padding = _ZEROS[: -(HEADER_BYTES + size) % PAGE] if pad else b""
    if size <= _PIECE:
        digest = xxhash.xxh3_128_digest(view)
        header = pack_header(Header(CODEC_RAW, size, size, generation, key, digest))
        write_all(fd, (header, view, padding), offset)
        return
    hasher = xxhash.xxh3_128()
    # Pieces end at the ends of pages, and the first page, which the header shares, comes last.
    head = PAGE - HEADER_BYTES
    hasher.update(view[:head])
    for at in range(head, size, _PIECE):
        piece = view[at : at + _PIECE]
        hasher.update(piece)
        write_all(fd, (piece, padding if at + _PIECE >= size else b""), offset + HEADER_BYTES + at)
    header = pack_header(Header(CODEC_RAW, size, size, generation, key, hasher.digest()))
    write_all(fd, (header, view[:head]), offset)


def _check_raw(fd: int, offset: int, header: Header, view: memoryview, done: int) -> None:
    """Read what is left of a raw payload after its first `done` bytes, and check all of it."""
    size = len(view)
    if size <= _PIECE:
        if done != size:
            raise BadValue("short payload")
        digest = xxhash.xxh3_128_digest(view)
    else:
        hasher = xxhash.xxh3_128(view[:_PIECE])
        for at in range(_PIECE, size, _PIECE):
            piece = view[at : at + _PIECE]
            done += read_all(fd, (piece,), offset + at)
            hasher.update(piece)
        if done != size:
            raise BadValue("short payload")
        digest = hasher.digest()
    if digest != header.payload_digest:
        raise BadValue("payload checksum")
