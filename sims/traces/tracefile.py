"""One file of a trace, read as lines, JSON objects, CSV records or one JSON document.

Every reader takes its bytes through a `TraceFile`, which unpacks gzip by content, decodes UTF-8, counts the bytes for
progress and knows the line that an error must name. It streams: no more than one line (64 MiB at most) is held, except
by `document`, which holds one file (1 GiB at most). Whatever the bytes are, only `TraceError` leaves this module.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import reprlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvtide.kvcache import TraceError

from .request import Progress

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_LINE_BYTES = 64 << 20
MAX_DOCUMENT_BYTES = 1 << 30
_PIECE_BYTES = 1 << 20

_BOM = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"
_DAMAGED_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 48
_short.maxlist = _short.maxdict = 4


def show(value: object) -> str:
    """Return a value for an error message, cut to a readable length."""
    return _short.repr(value)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


# Python's decoder takes NaN and Infinity unless told otherwise.
_decoder = json.JSONDecoder(parse_constant=_reject_constant)


class _CountedFile(io.FileIO):
    """A file that adds every byte read from it to a `Progress`."""

    def __init__(self, path: Path, progress: Progress) -> None:
        super().__init__(path, "rb")
        self._progress = progress

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        size = super().readinto(buffer)
        self._progress.bytes_read += size or 0
        return size


class TraceFile:
    """A file and the line being read in it (1-based; 0 before the first line and for whole documents)."""

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path = path
        self.progress = progress if progress is not None else Progress()
        self.line = 0
        self._unpacked = False

    def error(self, what: str) -> TraceError:
        """Return the error that says `what` is wrong at the current line; the caller raises it."""
        # Damaged gzip data can unpack to nonsense long before its checksum fails, so that is looked at first.
        if self._unpacked and (damage := self._gzip_damage()):
            what, self._unpacked = f"the gzip data is cut off or damaged ({damage})", False
        return TraceError(f"{self.path}, line {self.line}: {what}" if self.line else f"{self.path}: {what}")

    @contextmanager
    def _open(self) -> Iterator[io.BufferedIOBase]:
        try:
            with _CountedFile(self.path, self.progress) as raw, io.BufferedReader(raw, 1 << 17) as file:
                if file.peek(2)[:2] != _GZIP_MAGIC:
                    yield file
                else:
                    self._unpacked = True
                    with gzip.GzipFile(fileobj=file) as unpacked:
                        yield unpacked
        except _DAMAGED_GZIP as error:
            self._unpacked = False  # known, no need to look again
            raise self.error(f"the gzip data is cut off or damaged from here on ({error})") from None
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror or error}") from None

    def _gzip_damage(self) -> str:
        try:
            with gzip.open(self.path) as unpacked:
                while unpacked.read(1 << 20):
                    pass
        except (*_DAMAGED_GZIP, OSError) as error:
            return str(error)
        return ""

    def head(self, size: int) -> bytes:
        """Return the first `size` unpacked bytes, fewer if the file ends or breaks off, without the byte-order mark."""
        found = b""
        with self._open() as file:
            try:
                while len(found) < size and (more := file.read1(size - len(found))):
                    found += more
            except _DAMAGED_GZIP:
                if not found:
                    raise
        return found.removeprefix(_BOM)

    def lines(self) -> Iterator[str]:
        """Yield the lines that are not blank, with their line ends."""
        with self._open() as file:
            while raw := file.readline(MAX_LINE_BYTES + 1):
                self.line += 1
                if len(raw) > MAX_LINE_BYTES:
                    raise self.error(f"is longer than {MAX_LINE_BYTES >> 20} MiB, which no known format has")
                text = self._decode(raw.removeprefix(_BOM) if self.line == 1 else raw)
                if text and not text.isspace():
                    yield text

    def objects(self) -> Iterator[dict[str, Any]]:
        """Yield the JSON object of every line."""
        for text in self.lines():
            row = self._parse(text, f"line {self.line}")
            if type(row) is not dict:
                raise self.error(f"must hold a JSON object, not {show(row)}")
            yield row

    def records(self) -> Iterator[list[str]]:
        """Yield the CSV records, the header first; every record has as many fields as the first one."""
        width = 0
        try:
            for record in csv.reader(self.lines(), strict=True):
                width = width or len(record)
                if len(record) != width:
                    raise self.error(f"has {len(record)} fields, but the first line has {width}")
                yield record
        except csv.Error as error:
            raise self.error(f"is not valid CSV: {error}") from None

    def document(self) -> Any:
        """Return the whole file as one JSON value."""
        with self._open() as file:
            raw = bytearray()
            # Piece by piece: a file object sets aside as much as is asked for, whatever there is.
            while len(raw) <= MAX_DOCUMENT_BYTES and (piece := file.read(_PIECE_BYTES)):
                raw += piece
        if len(raw) > MAX_DOCUMENT_BYTES:
            raise self.error(f"is a single JSON document of more than {MAX_DOCUMENT_BYTES >> 30} GiB")
        return self._parse(self._decode(raw.removeprefix(_BOM)), "the file")

    def _decode(self, raw: bytes | bytearray) -> str:
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"byte 0x{raw[error.start]:02x} at offset {error.start} is not UTF-8 text") from None
        if "\0" in text:
            raise self.error(f"has a NUL byte at offset {text.index(chr(0))}; a trace is plain text")
        return text

    def _parse(self, text: str, what: str) -> Any:
        try:
            return _decoder.decode(text)
        except json.JSONDecodeError as error:
            self.line = self.line or error.lineno
            raise self.error(f"is not valid JSON: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise self.error(f"{what} nests JSON too deeply") from None
        except ValueError as error:  # NaN, Infinity, integers of thousands of digits
            raise self.error(f"{what} has a number that cannot be read: {str(error)[:60]}") from None
