"""Copies between the arena and staging memory, on a CPU and on a CUDA device.

    out    arena ──► staging      after the compute already enqueued has written the blocks
    in     staging ──► arena      after the compute already enqueued has read what the blocks held before

On a CPU a copy is done when the call returns. On a CUDA device each direction has a stream of its own: it waits for the
compute stream first, so that neither a block that is still being written is read, nor one that is still being read is
written; the compute stream in turn waits for the parts it asks for (`Copied.wait`), layer by layer if it likes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import ConfigError

from .staging import Staging

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]


class Run(NamedTuple):
    """Bytes `[arena, arena + num_bytes)` of the arena, and where they lie in staging memory."""

    arena: int
    staging: int
    num_bytes: int


class Copied:
    """Copies that were asked for; on a CPU they are done already."""

    def done(self) -> bool:
        """Whether they are complete, so that both memories may be used for something else."""
        return True

    def wait(self, part: int | None = None) -> None:
        """Let what is enqueued from now on see the given part (all parts if None)."""


class Copies(ABC):
    """Copies runs of bytes between one arena and one staging memory. Used by the manager's thread."""

    staging: Staging

    @abstractmethod
    def out(self, runs: Sequence[Run]) -> Copied:
        """Copy from the arena to staging."""

    @abstractmethod
    def into(self, parts: Sequence[Sequence[Run]]) -> Copied:
        """Copy from staging to the arena, part after part (one a layer, say)."""


class HostCopies(Copies):
    """For an arena in host memory."""

    def __init__(self, arena: Bytes, staging: Staging) -> None:
        self._arena = arena
        self.staging = staging

    def out(self, runs: Sequence[Run]) -> Copied:
        for run in runs:
            self.staging.memory[run.staging : run.staging + run.num_bytes] = self._arena[
                run.arena : run.arena + run.num_bytes
            ]
        return Copied()

    def into(self, parts: Sequence[Sequence[Run]]) -> Copied:
        for runs in parts:
            for run in runs:
                self._arena[run.arena : run.arena + run.num_bytes] = self.staging.memory[
                    run.staging : run.staging + run.num_bytes
                ]
        return Copied()


class _CudaCopied(Copied):
    def __init__(self, events: list[torch.cuda.Event], compute: torch.cuda.Stream) -> None:
        self._events = events
        self._compute = compute

    def done(self) -> bool:
        return bool(self._events[-1].query())  # type: ignore[no-untyped-call]

    def wait(self, part: int | None = None) -> None:
        self._compute.wait_event(self._events[-1 if part is None else part])


class CudaCopies(Copies):
    """For an arena on a CUDA device; staging memory is pinned. The compute stream is the current one of each call."""

    def __init__(self, arena: torch.Tensor, staging: Staging) -> None:
        import torch

        self._arena = arena
        self.staging = staging
        self._out_stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call]
        self._in_stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call]

    def out(self, runs: Sequence[Run]) -> Copied:
        return self._copy(self._out_stream, [runs], to_arena=False)

    def into(self, parts: Sequence[Sequence[Run]]) -> Copied:
        return self._copy(self._in_stream, parts, to_arena=True)

    def _copy(self, stream: torch.cuda.Stream, parts: Sequence[Sequence[Run]], *, to_arena: bool) -> Copied:
        import torch

        host = self.staging.tensor
        assert host is not None
        compute = torch.cuda.current_stream(self._arena.device)
        stream.wait_stream(compute)
        events = []
        with torch.cuda.stream(stream):
            for runs in parts:
                for run in runs:
                    device_bytes = self._arena[run.arena : run.arena + run.num_bytes]
                    host_bytes = host[run.staging : run.staging + run.num_bytes]
                    if to_arena:
                        device_bytes.copy_(host_bytes, non_blocking=True)
                    else:
                        host_bytes.copy_(device_bytes, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(stream)
                events.append(event)
        return _CudaCopied(events, compute)


def make_copies(arena: torch.Tensor | Bytes, staging_bytes: int) -> Copies:
    """The copies for an arena: flat uint8, a numpy array, or a torch tensor on a CPU or a CUDA device."""
    if isinstance(arena, np.ndarray):
        if arena.dtype != np.uint8 or arena.ndim != 1:
            raise ConfigError(f"the arena must be one row of uint8, not {arena.dtype} of shape {arena.shape}")
        return HostCopies(arena, Staging(staging_bytes))
    if str(arena.dtype) != "torch.uint8" or arena.dim() != 1:
        raise ConfigError(f"the arena must be one row of uint8, not {arena.dtype} of shape {tuple(arena.shape)}")
    if arena.device.type == "cpu":
        return HostCopies(arena.numpy(), Staging(staging_bytes))
    if arena.device.type == "cuda":
        return CudaCopies(arena, Staging(staging_bytes, pinned=True))
    raise ConfigError(f"an arena on {arena.device} cannot be copied from; allowed are cpu and cuda")
