"""What offload costs the engine's thread: steps with an `OffloadManager` beside the same steps without one.

    python benchmarks/offload_manager.py [--quick] [--json FILE]

Gemma-3-27B's layers with one head of 8 elements, so that planning is measured and not how fast this machine copies;
a host store. Times are wall times of the manager's thread, medians over repetitions in which the two take turns; the
ratio says how many times less a step costs with offload than without.

    decode     reserve, commit and poll for every running request, per step; a repetition is 256 steps, in which every
               row fills 16 blocks of 16 tokens
    prompt     admit and prefill a prompt of 32,768 tokens in chunks of 8,192; nothing of it is in the store
    load       admit it when the store has all of it and the device nothing, until it is ready (no peer: computing it
               takes seconds)
    release    release it; with offload, the store is told what was one prefix
"""

from __future__ import annotations

import time
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from report import Figure, alternate, common_options, publish, scaled

from kvtide.connectors.config import make_store
from kvtide.hma import HybridMemoryManager
from kvtide.kvcache import ModelLayout
from kvtide.kvcache.layout import Layer
from kvtide.kvcache.specs import FullAttention, SlidingWindow
from kvtide.offload.manager import OffloadManager
from kvtide.offload.transfers import Transfers

CYCLE = 256
STEP_TOKENS = 8192
POOL = "6GiB"
STORE = "8GiB"


def layout() -> ModelLayout:
    """Five sliding-window layers of 1,024 tokens to one of full attention, 62 in all."""
    full, window = FullAttention(1, 8, 8), SlidingWindow(1, 8, 8, window=1024)
    layers = tuple(Layer(index, full if index % 6 == 5 else window) for index in range(62))
    return ModelLayout(name="gemma-3-27b-thin", layers=layers, max_model_len=131_072)


class Engine:
    """A manager whose tokens nobody computes, with or without offload."""

    def __init__(self, offloads: bool, max_requests: int, pool: str = POOL) -> None:
        self.manager = HybridMemoryManager(
            layout(), pool, max_requests=max_requests, max_step_tokens=STEP_TOKENS, model_id="benchmark"
        )
        self.offload: OffloadManager | None = None
        if offloads:
            arena = np.zeros(self.manager.pool.num_pages * self.manager.geometry.page_bytes, dtype=np.uint8)
            self.store = make_store("HostConnector", {"max_bytes": STORE})
            self.transfers = Transfers(arena, self.store, staging_bytes=256 << 20, threads=1)
            self.offload = OffloadManager(self.manager, self.transfers, model="benchmark")

    def admit(self, name: str, prompt: npt.NDArray[np.int32]) -> int:
        """Admit and wait until the row is ready."""
        if self.offload is None:
            return self.manager.admit(name, prompt).row
        row = self.offload.admit(name, prompt).row
        while not self.offload.ready(row):
            time.sleep(0.001)  # an engine runs a step of others meanwhile
            self.offload.poll()
        return row

    def prefill(self, row: int, num_tokens: int) -> None:
        """Compute the rest of a prompt."""
        while (done := int(self.manager.committed[row])) < num_tokens:
            chunk = [min(STEP_TOKENS, num_tokens - done)]
            self.manager.reserve([row], chunk)
            (self.offload or self.manager).commit([row], chunk)
            if self.offload is not None:
                self.offload.poll()

    def decode(self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32]) -> None:
        """One step of one token a row."""
        ones = np.ones(len(rows), dtype=np.int64)
        self.manager.reserve(rows, ones)
        (self.offload or self.manager).commit(rows, ones, tokens)
        if self.offload is not None:
            self.offload.poll()

    def settle(self) -> None:
        """Wait until everything is stored."""
        if self.offload is not None:
            self.offload.poll()
            while self.offload.stats().held_bytes or not self.transfers.drain(10):
                self.offload.poll()

    def close(self) -> None:
        """End the workers."""
        if self.offload is not None:
            self.offload.close()
            self.store.close()


def decode_figure(num_rows: int, repetitions: int) -> Figure:
    """Time decode steps of `num_rows` rows of 1,000 to 3,000 tokens."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(1000, 3000, num_rows)
    prompts = [rng.integers(0, 200_000, length, dtype=np.int32) for length in lengths]

    def contestant(offloads: bool) -> tuple[Engine, npt.NDArray[np.int64]]:
        engine = Engine(offloads, num_rows)
        rows = [engine.admit(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
        for row, length in zip(rows, lengths.tolist(), strict=True):
            engine.prefill(row, length)
        engine.settle()
        return engine, np.array(rows)

    def cycle(engine: Engine, rows: npt.NDArray[np.int64]) -> float:
        tokens = rng.integers(0, 200_000, (CYCLE, num_rows), dtype=np.int32)
        began = time.perf_counter()
        for step in range(CYCLE):
            engine.decode(rows, tokens[step])
        took = time.perf_counter() - began
        engine.settle()
        return took / CYCLE

    with_it, without = contestant(True), contestant(False)
    value, peer = alternate(repetitions, lambda: cycle(*with_it), lambda: cycle(*without))
    with_it[0].close()
    return Figure(
        f"decode_{num_rows}", scaled(value, 1e3), "ms", scaled(peer, 1e3), note="a step with offload; peer: without"
    )


def prompt_figures(num_tokens: int, repetitions: int) -> list[Figure]:
    """Time a prompt that nobody has, and the same one when the store has it."""
    rng = np.random.default_rng(8)
    engines = {offloads: Engine(offloads, 1) for offloads in (True, False)}
    loads: list[float] = []
    releases: dict[bool, list[float]] = {True: [], False: []}

    def cold(offloads: bool) -> float:
        engine = engines[offloads]
        prompt = rng.integers(0, 200_000, num_tokens, dtype=np.int32)
        began = time.perf_counter()
        row = engine.admit("r", prompt)
        engine.prefill(row, num_tokens)
        took = time.perf_counter() - began
        engine.settle()
        began = time.perf_counter()
        (engine.offload or engine.manager).release(row)
        releases[offloads].append(time.perf_counter() - began)
        if engine.offload is None:
            return took
        engine.settle()
        engine.manager.reset_cache()
        began = time.perf_counter()
        row = engine.admit("r", prompt)
        loads.append(time.perf_counter() - began)
        assert engine.manager.committed[row] > num_tokens - 64, "the store lacks the prompt"
        engine.offload.release(row)
        engine.settle()
        engine.manager.reset_cache()
        return took

    value, peer = alternate(repetitions, lambda: cold(True), lambda: cold(False))
    engines[True].close()
    return [
        Figure("prompt", scaled(value, 1e3), "ms", scaled(peer, 1e3), note=f"{num_tokens} tokens, computed"),
        Figure("load", scaled(float(np.median(loads)), 1e3), "ms", note=f"{num_tokens} tokens, from the host store"),
        Figure(
            "release",
            scaled(float(np.median(releases[True])), 1e3),
            "ms",
            scaled(float(np.median(releases[False])), 1e3),
            note=f"{num_tokens} tokens",
        ),
    ]


@click.command(help=__doc__)
@common_options
def main(quick: bool, smoke: bool, json_file: Path | None) -> None:
    """Run and publish."""
    if smoke:
        figures = [decode_figure(4, 1), *prompt_figures(2048, 1)]
    else:
        sizes = (256,) if quick else (16, 64, 256, 1024)
        repetitions = 3 if quick else 5
        figures = [*(decode_figure(rows, repetitions) for rows in sizes), *prompt_figures(32_768, repetitions)]
    publish("What offload costs the engine's thread", figures, json_file)


if __name__ == "__main__":
    main()
