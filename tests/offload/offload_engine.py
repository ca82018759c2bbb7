"""An engine on a CPU arena for tests of offload: real bytes in real places, and what every query reads is checked.

The bytes of a token in a layer, component and head are a hash of all tokens up to it (with salt and images) and of that
place, so two blocks are equal only if they may be shared. Every step, each row reads through its tables all that its
next query can reach, as a kernel would, runs softmax attention over it, and samples its next token from the result. A
recurrent state is the hash of what it has seen; image tokens are written by the first step of a row. Blocks that
nothing holds or caches are overwritten with poison after every step.
"""

from __future__ import annotations

import random
import time
from hashlib import blake2b
from typing import Any

import numpy as np

from kvtide.hma import HybridMemoryManager
from kvtide.hma.groups import ManagedGroup
from kvtide.kvcache import Exhausted
from kvtide.kvcache.geometry import BlockFormat, PageGeometry
from kvtide.kvcache.layout import ModelLayout
from kvtide.kvcache.solver import solve_geometry
from kvtide.offload.manager import OffloadManager
from kvtide.offload.policies import LoadPolicy
from kvtide.offload.transfers import Transfers

EAGER = LoadPolicy(min_tokens=16, seconds_per_token=1.0, patience_s=0.1)
POISON = 0xEE


class Place:
    """Where a token's bytes lie inside a block of one table: offsets `[tokens, width]`, and a constant per byte."""

    def __init__(self, group: ManagedGroup, table: int, share: int) -> None:
        fmt = group.fmt
        layers = fmt.group.layers[table * fmt.layers_per_block : (table + 1) * fmt.layers_per_block]
        offsets: list[np.ndarray[Any, Any]] = []
        constants: list[np.ndarray[Any, Any]] = []
        tokens = np.arange(max(fmt.block_size, 1))[:, None]
        for layer in layers:
            for part in fmt.group.spec.components():
                start = fmt.place(layer)[1] + fmt.component_offset(part.name)
                offsets.append(start + tokens * part.num_bytes + np.arange(part.num_bytes))
                heads = part.shape[0] if len(part.shape) > 1 else 1
                for head in range(share * heads, (share + 1) * heads):
                    rng = random.Random(f"{layer} {part.name} {head}")
                    values = [rng.getrandbits(64) for _ in range(part.num_bytes // heads)]
                    constants.append(np.array(values, dtype=np.uint64))
        self.offsets = np.concatenate(offsets, axis=1)
        self.constants = np.concatenate(constants)

    def content(self, history: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Bytes `[n, width]` of tokens with these histories."""
        mixed = (history[:, None] ^ self.constants) * np.uint64(0x9E3779B97F4A7C15)
        return ((mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(56)).astype(np.uint8)


class Engine:
    """One process of one rank. `checks` False leaves it to the sampled tokens to show what was read."""

    def __init__(
        self,
        layout: ModelLayout,
        store: Any,
        *,
        pages: int = 200,
        staging_bytes: int = 1 << 20,
        deadline: float = 5.0,
        checks: bool = True,
        ahead: bool = False,
        drop_last_block: bool = False,
        max_requests: int = 4,
        **options: Any,
    ) -> None:
        whole = options.get("full_layout") or layout
        size, rank = options.get("tp_size", 1), options.get("tp_rank", 0)
        geometry = share_of(solve_geometry(whole), layout)
        self.manager = HybridMemoryManager(
            geometry,
            pages * geometry.page_bytes,
            max_requests=max_requests,
            max_model_len=600,
            max_step_tokens=64,
            key_space=b"test",
            drop_last_block=drop_last_block,
        )
        self.arena = np.full(pages * geometry.page_bytes, POISON, dtype=np.uint8)
        self.transfers = Transfers(self.arena, store, staging_bytes=staging_bytes, threads=2, deadline=deadline)
        options.setdefault("load_policy", EAGER)
        self.offload = OffloadManager(self.manager, self.transfers, model="test", **options)
        specs = {layer.index: layer.spec for layer in whole.layers}
        self.places = {}
        for group in self.manager.groups:
            shares = specs[group.fmt.group.layers[0]].components()[0].num_bytes
            shares //= group.fmt.group.spec.components()[0].num_bytes
            for table in range(group.fmt.tables):
                self.places[group.number, table] = Place(group, table, rank * shares // size)
        self.checks = checks
        self.ahead = ahead
        self.lives: dict[int, int] = {}
        self.pending: list[tuple[int, int, int]] | None = None
        self.new: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.history: dict[int, list[int]] = {}
        self.images: dict[int, tuple[int, list[Any]]] = {}
        self.has_image: set[int] = set()
        self.texts: dict[str, list[int]] = {}
        self.names: dict[int, str] = {}
        self.queries = 0
        self.tokens_checked = 0

    # -- requests -----------------------------------------------------------------------------------------------------

    def admit(self, name: str, tokens: list[int], **options: Any) -> int:
        row = self.offload.admit(name, tokens, **options).row
        self.names[row] = name
        self.lives[row] = self.lives.get(row, 0) + 1
        salt = blake2b(options.get("salt", "").encode(), digest_size=8).digest()
        self.tokens[row], self.history[row] = [], [int.from_bytes(salt, "little")]
        self.images[row] = (options.get("image_tokens", 0), list(options.get("items", ())))
        self.has_image.discard(row)
        self.learn(row, tokens)
        return row

    def resume(self, row: int) -> None:
        self.offload.resume(row)
        self.lives[row] += 1
        self.has_image.discard(row)
        # What was sampled in a step that the row left before its commit is sampled again.
        lost = len(self.tokens[row]) - self.manager.num_tokens(row)
        if lost:
            del self.tokens[row][-lost:], self.history[row][-lost:], self.texts[self.names[row]][-lost:]

    def learn(self, row: int, tokens: list[int]) -> None:
        for token in tokens:
            data = self.history[row][-1].to_bytes(8, "little") + int(token).to_bytes(4, "little")
            for item in self.images[row][1]:
                data += item.digest if item.position == len(self.tokens[row]) else b""
            self.history[row].append(int.from_bytes(blake2b(data, digest_size=8).digest(), "little"))
            self.tokens[row].append(int(token))

    # -- bytes --------------------------------------------------------------------------------------------------------

    def where(self, group: ManagedGroup, table: int, row: int, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Byte positions in the arena `[n, width]` of tokens."""
        place = self.places[group.number, table]
        slots = group.slots(np.full(len(positions), row), positions)[table]
        assert (slots >= 0).all(), f"{group.name} of row {row} has no slot for a token that it needs"
        entries, offsets = np.divmod(slots, group.fmt.block_size)
        return (entries * self.manager.geometry.unit)[:, None] + place.offsets[offsets]

    def state_at(self, group: ManagedGroup, table: int, row: int) -> np.ndarray[Any, Any]:
        start = int(group.table.entries[table, row, 0]) * self.manager.geometry.unit
        return start + self.places[group.number, table].offsets

    def truth(self, row: int, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.array(self.history[row], dtype=np.uint64)[positions + 1]

    def image_history(self, row: int) -> np.ndarray[Any, Any]:
        count, items = self.images[row]
        seed = blake2b(repr([(i.digest) for i in items]).encode() if items else self.names[row].encode(), digest_size=4)
        return np.arange(count, dtype=np.uint64) + np.uint64(int.from_bytes(seed.digest(), "little"))

    def read(self, row: int, committed: int) -> int:
        """Attention of the query at `committed` over everything that it reaches, and the token that it samples."""
        outputs = []
        for group in self.manager.groups:
            reach = group.fmt.group.spec.needed(np.array(committed + 1))
            positions = np.concatenate([np.arange(int(reach.sinks)), np.arange(int(reach.first), committed)])
            history = self.truth(row, positions)
            if group.is_cross:
                history = self.image_history(row)
                positions = np.arange(len(history))
            if group.is_state:
                positions, history = np.zeros(min(committed, 1)), self.truth(row, np.array([committed - 1]))
            for table in range(group.fmt.tables):
                if not len(positions):
                    continue
                at = self.state_at(group, table, row) if group.is_state else self.where(group, table, row, positions)
                found = self.arena[at]
                self.queries += 1
                if self.checks:
                    expected = self.places[group.number, table].content(history)
                    assert (found == expected).all(), f"{group.name} of row {row}: the query at {committed}"
                    self.tokens_checked += len(positions)
                outputs.append(attend(found, committed))
        return int(sum(outputs) * 1e6) % 1000

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, rows: list[int], most: int) -> bool:
        """Compute up to `most` tokens of every row that is ready. True if it fitted.

        With `ahead` a step is committed only once the next one has been computed.
        """
        rows = [row for row in rows if self.offload.ready(row)]
        known = [len(self.tokens[row]) - self.position(row) for row in rows]
        counts = [min(most, max(1, count)) for count in known]
        if not rows:
            return self.commit()
        try:
            plan = self.manager.reserve(rows, counts)
        except Exhausted:
            return self.commit() if self.pending else False
        self.copy_blocks(plan.copies)
        new: dict[int, int] = {}
        for row, start, count in zip(rows, plan.start.tolist(), counts, strict=True):
            self.write_image(row)
            sampled = self.read(row, start)
            if start + count > len(self.tokens[row]):
                self.learn(row, [sampled])
                new[row] = sampled
                self.texts.setdefault(self.names[row], []).append(sampled)
            self.compute(row, start, count)
        previous = self.pending
        self.pending = [(row, self.lives[row], count) for row, count in zip(rows, counts, strict=True)]
        previous_new, self.new = self.new, new
        if previous is not None:
            self.commit_step(previous, previous_new)
        return True if self.ahead else self.commit()

    def position(self, row: int) -> int:
        return int(self.manager.committed[row]) + int(self.manager.in_flight[row])

    def commit(self) -> bool:
        """Commit the step that is in flight, if there is one."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self.commit_step(pending, self.new)
            self.new = {}
        return True

    def commit_step(self, members: list[tuple[int, int, int]], new: dict[int, int]) -> None:
        running = self.manager.running_rows
        alive = [(row, count) for row, life, count in members if self.lives.get(row) == life and row in running]
        rows = [row for row, _ in alive]
        self.offload.commit(rows, [count for _, count in alive], [new[row] for row in rows if row in new])
        self.poison()

    def copy_blocks(self, copies: Any) -> None:
        unit = self.manager.geometry.unit
        for copy in copies:
            size = self.manager.group(copy.group).fmt.block_bytes
            for source, destination in zip(copy.source.tolist(), copy.destination.tolist(), strict=True):
                self.arena[destination * unit :][:size] = self.arena[source * unit :][:size]

    def write_image(self, row: int) -> None:
        if row in self.has_image:
            return
        self.has_image.add(row)
        history = self.image_history(row)
        for group in self.manager.groups:
            for table in range(group.fmt.tables) if group.is_cross and len(history) else ():
                at = self.where(group, table, row, np.arange(len(history)))
                self.arena[at] = self.places[group.number, table].content(history)

    def compute(self, row: int, start: int, count: int) -> None:
        positions = np.arange(start, start + count)
        for group in self.manager.groups:
            for table in range(group.fmt.tables):
                content = self.places[group.number, table].content
                if group.is_state:
                    self.arena[self.state_at(group, table, row)] = content(self.truth(row, positions[-1:]))
                elif not group.is_cross:
                    self.arena[self.where(group, table, row, positions)] = content(self.truth(row, positions))

    def checkpoint(self, row: int) -> None:
        """Keep the row's states if it stands where that is possible."""
        committed = int(self.manager.committed[row])
        at_rest = self.offload.ready(row) and not self.manager.in_flight[row]
        if at_rest and committed and committed % self.manager.base == 0:
            self.copy_blocks(self.offload.checkpoint(row))

    def poison(self) -> None:
        """Overwrite every block that nothing holds and no key stands for."""
        pool, geometry = self.manager.pool, self.manager.geometry
        idle = np.flatnonzero((pool.refs == 0) & ~pool.cached)
        pages, slots = np.divmod(idle, pool.stride)
        for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
            owner = int(pool.owner[page])
            if owner >= 0 and slot < pool.per_page[owner]:
                start = page * geometry.page_bytes + slot * geometry.formats[owner].block_bytes
                self.arena[start : start + geometry.formats[owner].block_bytes] = POISON
        for page in np.flatnonzero(pool.owner < 0).tolist():
            self.arena[page * geometry.page_bytes : (page + 1) * geometry.page_bytes] = POISON

    # -- a test's verbs -----------------------------------------------------------------------------------------------

    def settle(self, row: int, timeout: float = 60.0) -> int:
        """Poll until the row is ready; returns the tokens it starts from."""
        expires = time.monotonic() + timeout
        while not self.offload.ready(row):
            self.offload.poll()
            assert time.monotonic() < expires
            time.sleep(0.0003)
        self.manager.check()
        return int(self.manager.committed[row])

    def run(self, row: int, upto: int, most: int = 64, *, checkpoints: bool = True) -> None:
        while self.position(row) < upto:
            assert self.step([row], min(most, upto - self.position(row)))
            if checkpoints and self.has_states:
                self.checkpoint(row)
            self.offload.poll()

    @property
    def has_states(self) -> bool:
        return any(group.is_state for group in self.manager.groups)

    def flush(self) -> None:
        """Wait until nothing is on its way."""
        self.commit()
        expires = time.monotonic() + 60
        while self.offload.stats().held_bytes or not self.transfers.drain(0.01):
            self.offload.poll()
            assert time.monotonic() < expires
        self.offload.poll()

    def close(self) -> None:
        """End it in order; nothing may be left behind."""
        self.commit()
        assert self.offload.close(60)
        stats = self.offload.stats()
        assert (stats.held_bytes, stats.rows_on_their_way) == (0, 0)
        assert stats.staging_bytes_free == self.transfers.staging_bytes
        for row in self.manager.running_rows.tolist():
            self.offload.release(row)
        self.manager.check()
        assert self.manager.pool.refs.sum() == 0


def share_of(whole: PageGeometry, layout: ModelLayout) -> PageGeometry:
    """A rank's geometry, cut like the whole model's: ranks of different TP sizes must agree on blocks and tables."""
    cuts = []
    for fmt, group in zip(whole.formats, layout.groups, strict=True):
        cuts.append(
            (group, fmt.block_size, fmt.tables, group.spec.state_bytes or group.spec.bytes_per_token * fmt.block_size)
        )
    page = max(len(group.layers) // tables * layer_bytes for group, _, tables, layer_bytes in cuts)
    return PageGeometry("share", layout, page, tuple(BlockFormat(*cut, page_bytes=page) for cut in cuts))


def attend(found: np.ndarray[Any, Any], query: int) -> float:
    """Softmax attention of one query over bytes `[n, width]`, as one number."""
    keys = found.astype(np.float64) / 255
    scores = np.einsum("kd,d->k", keys, np.random.default_rng(query).standard_normal(keys.shape[1]))
    weights = np.exp(scores - scores.max())
    return float((np.einsum("k,kd->d", weights, keys) / weights.sum()).sum())


def prompt(seed: int, count: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(1000) for i in range(count)]
