"""Block copies: whole blocks between two memories, each one contiguous range of bytes.

    source        | .... [block] ........ [block][block] .... |
    destination   | [block][block] .................. [block] |        neighbours in both become one copy

For offloading (device memory and pinned host memory, either way) and for moving pages (within one memory, or between
two of a kind). With CUDA memory the copies are enqueued on a stream and this returns at once; the caller keeps both
memories alive and unchanged until the event that it gets is done.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch

from kvtide.kvcache import ConfigError

from .arguments import check_contiguous, check_tensor, check_whole

Int64Array = npt.NDArray[np.int64]


def copy_blocks(
    source: torch.Tensor,
    destination: torch.Tensor,
    source_offsets: npt.ArrayLike,
    destination_offsets: npt.ArrayLike,
    num_bytes: int,
    *,
    stream: torch.cuda.Stream | None = None,
) -> torch.cuda.Event | None:
    """Copy `num_bytes` from each source offset to the destination offset at the same place in the list.

    `source` and `destination` uint8 [bytes], contiguous: `Arena.memory`, or pinned host memory (memory that is not
    pinned works, and is slow). Offsets are byte offsets on the host: arrays, lists or CPU tensors of integers. `stream`
    is the CUDA stream to copy on, the device's current one if None; it waits for nothing else.

    Returns an event that is done when the copies are; None when both memories are the host's: then they are done.
    `ConfigError` for offsets outside a memory, and for blocks that would be written twice, or read after they were
    written.
    """
    num_bytes = check_whole("num_bytes", num_bytes)
    for name, memory in (("source", source), ("destination", destination)):
        check_contiguous(name, check_tensor(name, memory, ("bytes",), (torch.uint8,), None))
    starts = _offsets("source", source_offsets, num_bytes, source)
    ends = _offsets("destination", destination_offsets, num_bytes, destination)
    if len(starts) != len(ends):
        raise ConfigError(f"there are {len(starts)} source offsets and {len(ends)} destination offsets")
    _check_overlap(source, destination, starts, ends, num_bytes)
    devices = {memory.device for memory in (source, destination) if memory.device.type == "cuda"}
    if stream is not None and not devices:
        raise ConfigError("stream is given; both memories are on the CPU, where copies take none")
    device = stream.device if stream is not None else next(iter(devices), None)
    on_stream = torch.cuda.stream(stream) if stream is not None else nullcontext()
    with torch.cuda.device(device) if device is not None else nullcontext(), on_stream:
        for start, end, length in _runs(starts, ends, num_bytes):
            destination[end : end + length].copy_(source[start : start + length], non_blocking=True)
        if device is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


def _offsets(name: str, offsets: npt.ArrayLike, num_bytes: int, memory: torch.Tensor) -> Int64Array:
    if isinstance(offsets, torch.Tensor) and offsets.device.type != "cpu":
        raise ConfigError(f"{name}_offsets are on {offsets.device}; they must be on the CPU, because they are read")
    found = np.asarray(offsets)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise ConfigError(
            f"{name}_offsets have the shape {list(found.shape)} of {found.dtype}; give a list of integers"
        )
    found = found.astype(np.int64)
    if found.size and (found.min() < 0 or found.max() > len(memory) - num_bytes):
        bad = int(found.min()) if found.min() < 0 else int(found.max())
        raise ConfigError(
            f"{name}_offsets hold {bad}; {num_bytes} bytes from there are outside the {name}'s {len(memory)} bytes"
        )
    return found


def _check_overlap(
    source: torch.Tensor, destination: torch.Tensor, starts: Int64Array, ends: Int64Array, num_bytes: int
) -> None:
    written = np.sort(ends)
    twice = np.flatnonzero(np.diff(written) < num_bytes)
    if len(twice):
        raise ConfigError(
            f"destination_offsets {written[twice[0]]} and {written[twice[0] + 1]} overlap, at {num_bytes} bytes a block"
        )
    # Two tensors can be parts of one memory: compare addresses.
    shift = source.data_ptr() - destination.data_ptr()
    if source.device != destination.device or not len(written):
        return
    # The last block written that starts before the end of what is read.
    before = np.searchsorted(written, starts + shift + num_bytes) - 1
    read = np.flatnonzero((before >= 0) & (written[before] + num_bytes > starts + shift))
    if len(read):
        raise ConfigError(f"the block at source offset {starts[read[0]]} overlaps one that is written in the same call")


def _runs(starts: Int64Array, ends: Int64Array, num_bytes: int) -> list[tuple[int, int, int]]:
    """Source offset, destination offset and length of ranges that are contiguous on both sides."""
    if not len(starts):
        return []
    # In the order of the source; any order gives the same bytes, as no block is both read and written.
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    breaks = np.flatnonzero((np.diff(starts) != num_bytes) | (np.diff(ends) != num_bytes)) + 1
    bounds = np.concatenate(([0], breaks, [len(starts)]))
    lengths = np.diff(bounds) * num_bytes
    return list(zip(starts[bounds[:-1]].tolist(), ends[bounds[:-1]].tolist(), lengths.tolist(), strict=True))
