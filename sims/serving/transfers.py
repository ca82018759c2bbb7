"""The transfer engine in virtual time: `kvtide.offload`'s manager moves values with it as with the real one.

    put   device ──copy, on the nearest tier's link──► released ──links of lower tiers──► finished, visible
    get   tiers ──each on its link, at once──► finished

A link carries one transfer after another, each way by itself, at its tier's bandwidth; the latency comes on top and
keeps nobody else waiting. Nothing happens by itself: the engine says what time it is, `poll` applies what is due.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvtide.offload.keys import StoreKey
from kvtide.offload.staging import staging_bytes
from kvtide.offload.store import Status
from kvtide.offload.transfers import Value

from .tiers import TierStack

STAGING_BYTES = 4 << 30


class VirtualLookUp:
    """Which keys are there, answered at once; they are not evicted until it is closed."""

    def __init__(self, stack: TierStack, keys: Sequence[StoreKey]) -> None:
        self._stack = stack
        found = [stack.where(key) is not None for key in keys]
        self.statuses = [Status.HIT if there else Status.MISS for there in found]
        self._held = [key for key, there in zip(keys, found, strict=True) if there]
        stack.in_use.update(self._held)

    def close(self) -> None:
        """Let go."""
        held, self._held = self._held, []
        for key in held:
            if self._stack.in_use[key] == 1:
                del self._stack.in_use[key]  # so that what is in use is what the counter has
            else:
                self._stack.in_use[key] -= 1


class VirtualTransfer:
    """A batch on its way: `copied_s` is when a put no longer needs the device's blocks, `done_s` when it has ended."""

    def __init__(self, transfers: VirtualTransfers, values: list[Value], copied_s: float, done_s: float) -> None:
        self.values = values
        self.copied_s, self.done_s = copied_s, done_s
        self.statuses: list[Status] | None = None
        self.released = False
        self.is_put = False
        self._transfers = transfers

    def cancel(self) -> None:
        """The values are not wanted any more."""
        self._transfers.forget(self)

    def wait_copied(self) -> None:
        """The next step must not begin before the device's blocks have been copied out."""
        if self.is_put and not self.released:
            self._transfers.stalled_until = max(self._transfers.stalled_until, self.copied_s)

    def wait_layer(self, layer: int) -> None:
        """A get that has ended is on the device, all of it."""


class VirtualTransfers:
    """Moves between one rank's device and its tiers. `now` is set by whoever keeps the time."""

    def __init__(self, stack: TierStack, *, staging_bytes: int = STAGING_BYTES) -> None:
        self.stack = stack
        self.now = 0.0
        self.staging_bytes = staging_bytes
        # When copies out of the device are done that the next step must wait for, and the seconds waited in all.
        self.stalled_until = 0.0
        self.read_bytes = np.zeros(len(stack.tiers), dtype=np.int64)
        self.put_bytes = 0
        self._out = [0.0] * len(stack.tiers)
        self._in = [0.0] * len(stack.tiers)
        self._active: list[VirtualTransfer] = []
        self._taken = 0
        self._blocking = False

    @property
    def staging_bytes_free(self) -> int:
        """Staging bytes that nothing uses; a copy that the engine waits for needs none."""
        return self.staging_bytes if self._blocking else self.staging_bytes - self._taken

    @property
    def next_event_s(self) -> float | None:
        """When something will next be due; None when nothing is on its way."""
        times = [t.copied_s if t.is_put and not t.released else t.done_s for t in self._active]
        return min(times, default=None)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Puts inside give the device's blocks back at once, and the next step waits until they have been copied."""
        self._blocking = True
        try:
            yield
        finally:
            self._blocking = False

    def look_up(self, keys: Sequence[StoreKey]) -> VirtualLookUp:
        """Ask which keys are there and hold them."""
        return VirtualLookUp(self.stack, keys)

    def touch_prefix(self, keys: Sequence[StoreKey]) -> None:
        """Keys are one prefix from its first block on."""
        self.stack.touch_prefix(keys)

    def put(self, values: Iterable[Value], *, owner: str = "") -> VirtualTransfer | None:
        """Store values; None when staging has no room for them."""
        batch = list(values)
        needs = sum(staging_bytes(value.num_bytes) for value in batch)
        if needs > self.staging_bytes_free:
            return None
        size = sum(value.num_bytes for value in batch)
        self.put_bytes += size
        ends = [self._send(self._out, number, size) for number in range(self.stack.num_written_at_once)]
        transfer = VirtualTransfer(self, batch, ends[0], max(ends))
        transfer.is_put = True
        if self._blocking:
            transfer.wait_copied()
            transfer.released = True
        self._start(transfer)
        return transfer

    def get(self, values: Iterable[Value]) -> tuple[VirtualTransfer | None, int]:
        """Load as many of the values, from the first on, as staging has room for."""
        batch: list[Value] = []
        free = self.staging_bytes_free
        for value in values:
            free -= staging_bytes(value.num_bytes)
            if free < 0:
                break
            batch.append(value)
        if not batch:
            return None, 0
        sizes = np.zeros(len(self.stack.tiers), dtype=np.int64)
        for value in batch:
            number = self.stack.where(value.key)
            if number is not None:
                sizes[number] += value.num_bytes
        ends = [self._send(self._in, number, int(size)) for number, size in enumerate(sizes) if size]
        transfer = VirtualTransfer(self, batch, self.now, max(ends, default=self.now))
        self._start(transfer)
        return transfer, len(batch)

    def poll(self) -> None:
        """Apply what is due by now, in the order in which it came to an end."""
        for transfer in sorted(self._active, key=lambda transfer: transfer.done_s):
            if transfer.is_put and transfer.copied_s <= self.now:
                transfer.released = True
            if transfer.done_s > self.now:
                continue
            if transfer.is_put:
                transfer.statuses = self._write(transfer.values)
            else:
                transfer.statuses = self._arrived(transfer.values)
                transfer.released = True
            self.forget(transfer)

    def forget(self, transfer: VirtualTransfer) -> None:
        """Nobody waits for a transfer any more, or it has ended: its staging memory is free."""
        if transfer in self._active:
            self._active.remove(transfer)
            self._taken -= sum(staging_bytes(value.num_bytes) for value in transfer.values)

    def close(self, timeout: float = 0.0) -> bool:
        """Nothing runs by itself, so there is nothing to wait for."""
        return True

    def _write(self, values: Sequence[Value]) -> list[Status]:
        if self.stack.num_written_at_once > 1:
            return self.stack.write(values)
        before = [tier.counts["written"] for tier in self.stack.tiers]
        statuses = self.stack.write(values)
        for number, tier in enumerate(self.stack.tiers[1:], 1):  # what the nearest tier evicted goes down its link
            self._send(self._out, number, tier.counts["written"] - before[number])
        return statuses

    def _arrived(self, values: Sequence[Value]) -> list[Status]:
        statuses = []
        for value in values:
            number = self.stack.where(value.key)
            statuses.append(Status.MISS if number is None else Status.HIT)
            if number is not None:
                self.read_bytes[number] += value.num_bytes
        self.stack.read([value.key for value in values])
        return statuses

    def _start(self, transfer: VirtualTransfer) -> None:
        self._active.append(transfer)
        self._taken += sum(staging_bytes(value.num_bytes) for value in transfer.values)

    def _send(self, links: list[float], number: int, num_bytes: int) -> float:
        """When bytes that start now have crossed a tier's link, one way, behind those before them."""
        spec = self.stack.tiers[number].spec
        links[number] = max(links[number], self.now) + num_bytes / spec.bandwidth
        return links[number] + spec.latency_s
