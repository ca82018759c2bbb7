"""How a value's bytes may be packed for a tier: losslessly, or in FP8; chosen by name for a whole store.

    name                number  payload
    raw                      0  the value
    zstd                     1  its even bytes, then its odd bytes, then what is left of an odd length; zstd level 1
    lz4                      2  the same order of bytes; one LZ4 block
    fp8_bfloat16             3  lossy, see below; the value is bfloat16 elements
    fp8_float16              4  ... float16
    fp8_float32              5  ... float32

Splitting even and odd bytes brings the exponents of 16-bit elements together, where nearly all of the redundancy of KV
is. The FP8 codecs change numbers: every 128 elements share a power-of-two scale (one byte, 127 + its exponent), and
each element is kept as e4m3 (3 bits of mantissa, rounded to nearest even): payload = scales, then elements. An element
changes by at most 1/16 of itself, or, if smaller than 2^-13 of the largest of its 128, of that much. Elements are
little-endian; the codecs' numbers are part of the value format and are never used again for something else.

A codec need not take a value: what would not get smaller, or holds NaN, infinity or nearly that, is stored raw
(`sealing`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import ConfigError, MissingExtra

from .values import BadValue

Bytes = npt.NDArray[np.uint8]

SCALED_TOGETHER = 128
_E4M3_MAX_EXPONENT = 8  # the largest e4m3 number is 1.75 * 2^8
_SCALE_BIAS = 127
_PIECE = 1 << 17  # elements per pass: the float32 of a piece stay in a core's cache


class Codec(ABC):
    """One packing of bytes. May be used by several threads at once."""

    name: str
    number: int
    lossy: bool = False

    @abstractmethod
    def encode(self, raw: memoryview) -> memoryview | None:
        """The payload for a value of at least one byte; None where the codec cannot take it."""

    @abstractmethod
    def decode(self, payload: memoryview, out: memoryview) -> None:
        """Fill `out` from a payload; `BadValue` unless the payload is exactly that many bytes. Allocates no more."""


class _Zstd(Codec):
    name = "zstd"
    number = 1

    def __init__(self) -> None:
        self._zstd = _package("zstd", "zstandard", "zstandard")
        self._local = threading.local()  # contexts are costly to make and belong to one thread

    def encode(self, raw: memoryview) -> memoryview:
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = self._local.compressor = self._zstd.ZstdCompressor(level=1, write_checksum=False)
        return memoryview(compressor.compress(_split(raw)))

    def decode(self, payload: memoryview, out: memoryview) -> None:
        decompressor = getattr(self._local, "decompressor", None)
        if decompressor is None:
            decompressor = self._local.decompressor = self._zstd.ZstdDecompressor()
        try:
            if self._zstd.frame_content_size(payload) != out.nbytes:
                raise BadValue("length differs")
            # With its length in the frame checked, this allocates that much and no more.
            split = decompressor.decompress(payload, allow_extra_data=False)
        except self._zstd.ZstdError:
            raise BadValue("undecodable") from None
        _merge(split, out)


class _Lz4(Codec):
    name = "lz4"
    number = 2

    def __init__(self) -> None:
        self._block = _package("lz4", "lz4", "lz4.block")

    def encode(self, raw: memoryview) -> memoryview:
        return memoryview(self._block.compress(_split(raw), store_size=False))

    def decode(self, payload: memoryview, out: memoryview) -> None:
        try:
            split = self._block.decompress(payload, uncompressed_size=out.nbytes)
        except self._block.LZ4BlockError:
            raise BadValue("undecodable") from None
        if len(split) != out.nbytes:
            raise BadValue("length differs")
        _merge(split, out)


class _Fp8(Codec):
    lossy = True

    def __init__(self, name: str, number: int, element_bytes: int, max_exponent: int) -> None:
        self.name = name
        self.number = number
        self._element_bytes = element_bytes
        self._limit = 1.75 * 2.0**max_exponent  # the largest element that does not round up to infinity
        # Every float16, rounded to e4m3; and every e4m3 byte's number.
        self._codes = _e4m3_codes(np.arange(1 << 16, dtype=np.uint16).view(np.float16))
        self._numbers = _e4m3_numbers()

    def encode(self, raw: memoryview) -> memoryview | None:
        if raw.nbytes % self._element_bytes:
            return None
        count = raw.nbytes // self._element_bytes
        scales = -(-count // SCALED_TOGETHER)
        payload = np.empty(scales + count, np.uint8)
        for start in range(0, count, _PIECE):
            stop = min(start + _PIECE, count)
            numbers = self._to_float32(raw, start, stop)
            rows = np.zeros((-(-len(numbers) // SCALED_TOGETHER), SCALED_TOGETHER), np.float32)
            rows.reshape(-1)[: len(numbers)] = numbers
            largest = np.abs(rows).max(axis=1)
            if not (largest <= self._limit).all():
                return None
            # The largest becomes 1 to 1.75 times 2^8 or 1.75 to 2 times 2^7; frexp's fraction is from 0.5 to 1.
            fraction, exponent = np.frexp(largest)
            exponent = exponent - 1 + (fraction > 0.875) - _E4M3_MAX_EXPONENT
            exponent = np.maximum(exponent, 1 - _SCALE_BIAS)
            rows *= _power_of_two(-exponent)[:, None]
            halves = rows.astype(np.float16)
            first = start // SCALED_TOGETHER
            payload[first : first + len(rows)] = exponent + _SCALE_BIAS
            codes = self._codes[halves.view(np.uint16).reshape(-1)[: len(numbers)]]
            payload[scales + start : scales + stop] = codes
        return payload.data

    def decode(self, payload: memoryview, out: memoryview) -> None:
        count, rest = divmod(out.nbytes, self._element_bytes)
        scales = -(-count // SCALED_TOGETHER)
        if rest or payload.nbytes != scales + count:
            raise BadValue("length differs")
        packed = np.frombuffer(payload, np.uint8)
        for start in range(0, count, _PIECE):
            stop = min(start + _PIECE, count)
            rows = np.zeros((-(-(stop - start) // SCALED_TOGETHER), SCALED_TOGETHER), np.float32)
            rows.reshape(-1)[: stop - start] = self._numbers[packed[scales + start : scales + stop]]
            first = start // SCALED_TOGETHER
            exponent = packed[first : first + len(rows)].astype(np.int32) - _SCALE_BIAS
            rows *= _power_of_two(exponent)[:, None]
            self._from_float32(rows.reshape(-1)[: stop - start], out, start, stop)

    def _to_float32(self, raw: memoryview, start: int, stop: int) -> npt.NDArray[np.float32]:
        part = raw[start * self._element_bytes : stop * self._element_bytes]
        if self.name == "fp8_bfloat16":
            return (np.frombuffer(part, np.uint16).astype(np.uint32) << 16).view(np.float32)
        return np.frombuffer(part, np.float16 if self._element_bytes == 2 else np.float32).astype(np.float32)

    def _from_float32(self, numbers: npt.NDArray[np.float32], out: memoryview, start: int, stop: int) -> None:
        part = out[start * self._element_bytes : stop * self._element_bytes]
        if self.name == "fp8_bfloat16":
            # 4 bits of mantissa fit into bfloat16's 8: cutting the rest off loses nothing.
            np.frombuffer(part, np.uint16)[:] = numbers.view(np.uint32) >> 16
        else:
            np.frombuffer(part, np.float16 if self._element_bytes == 2 else np.float32)[:] = numbers


_MAKERS: dict[str, Callable[[], Codec]] = {
    "zstd": _Zstd,
    "lz4": _Lz4,
    "fp8_bfloat16": lambda: _Fp8("fp8_bfloat16", 3, 2, 127),
    "fp8_float16": lambda: _Fp8("fp8_float16", 4, 2, 15),
    "fp8_float32": lambda: _Fp8("fp8_float32", 5, 4, 127),
}
CODECS = ("raw", *_MAKERS)
_NUMBERS = dict(enumerate(_MAKERS, 1))


def codec_named(name: str) -> Codec | None:
    """The codec of a configuration's name, None for raw; `ConfigError` or `MissingExtra` where it cannot be used."""
    if name not in CODECS:
        raise ConfigError(f"codec {name!r} is not known; allowed are {', '.join(CODECS)}")
    return None if name == "raw" else _made(name)


def codec_numbered(number: int) -> Codec:
    """The codec of a header's number; `BadValue` if there is none such here."""
    name = _NUMBERS.get(number)
    if name is None:
        raise BadValue("unknown codec")
    try:
        return _made(name)
    except MissingExtra:
        raise BadValue("codec not installed") from None


@cache
def _made(name: str) -> Codec:
    return _MAKERS[name]()


def _package(name: str, package: str, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise MissingExtra(f"codec {name!r}", package, "compression") from None


def _split(raw: memoryview) -> Bytes:
    data = np.frombuffer(raw, np.uint8)
    pairs = len(data) // 2
    split = np.empty_like(data)
    split[: 2 * pairs].reshape(2, pairs)[:] = data[: 2 * pairs].reshape(pairs, 2).T
    split[2 * pairs :] = data[2 * pairs :]
    return split


def _merge(split: bytes, out: memoryview) -> None:
    data, merged = np.frombuffer(split, np.uint8), np.frombuffer(out, np.uint8)
    pairs = len(data) // 2
    merged[: 2 * pairs].reshape(pairs, 2)[:] = data[: 2 * pairs].reshape(2, pairs).T
    merged[2 * pairs :] = data[2 * pairs :]


def _power_of_two(exponent: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    return np.ldexp(np.float32(1), exponent)


def _e4m3_numbers() -> npt.NDArray[np.float32]:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    size[(code & 127) == 127] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


def _e4m3_codes(numbers: npt.NDArray[np.float16]) -> Bytes:
    """Nearest e4m3 codes, ties to even; NaN and what is larger than e4m3's largest are never asked for."""
    sizes = _e4m3_numbers()[:127]
    wanted = np.abs(np.where(np.isfinite(numbers), numbers, 0).astype(np.float32))
    upper = np.clip(np.searchsorted(sizes, wanted), 1, 126)
    below, above = wanted - sizes[upper - 1], sizes[upper] - wanted
    code = np.where((below < above) | ((below == above) & (upper % 2 == 1)), upper - 1, upper)
    return np.where(np.signbit(numbers), code + 128, code).astype(np.uint8)
