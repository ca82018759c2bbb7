"""What the memory manager itself costs, beside vLLM's `KVCacheManager` in the same run on the same requests.

    python benchmarks/allocator.py [--quick] [--json FILE] [--vllm-python PATH]

`--vllm-python` (or `KVTIDE_VLLM_PYTHON`) names the Python of an environment that has vLLM; without it the peer's
columns stay empty. Layout: Gemma-3-27B, bf16, prefix caching on, equal memory for both; kvtide with the geometry that
it picks itself, vLLM with its planner's seven groups and its default settings. Times are CPU times of the calling
thread, medians over repetitions in which the two take turns (the first half of a turn does not count). Prompts are
lists of random token ids, as a tokenizer gives them.

    decode step    reserve and commit one token for every running request of 1,000 to 3,000 tokens; for the peer,
                   per request: append the token (which hashes full blocks), allocate_slots, new block ids
    long decode    the same once every row has decoded more tokens than its window has, so that blocks leave the window
                   that were decoded, not prefilled: kvtide puts keys off until then
    cold prompt    admit, prefill and release a prompt of 2,000 tokens that nobody has seen
    full hit       the same for a prompt of 32,768 tokens that is cached: hash, look up, take, free
    full pool      the same when every block of the pool is cached or in use, so that whatever is taken evicts
    array          the same with the prompt given to kvtide as an array
    dense          the peer set to cache every window block, as kvtide does; its default caches only those at the end
    batch, context decode step by number of rows, and by context length (not with the peer beyond the largest batch)
    pool           a pool of 10 million blocks: construction, and a decode step against the same in a small pool
    state          resident bytes that a manager adds when it holds running requests, per million tokens of KV

`--quick` with the peer, on two busy cores (load 14 to 18), lowest and highest of three runs:

    decode step    293 to 325 µs, 76 to 85 times less than the peer (aim 100); long decode 271 to 320 µs, 71 to 86 times
    cold prompt    738 to 824 µs, 1.5 times less (aim 10)
    full hit       1.74 to 2.00 ms, 3.3 to 3.5 times less (aim 10); of an array 1.36 to 1.69 ms, 4.0 to 4.3 times

The three aims are missed. What is left is about a hundred array calls a step, for one row as for a thousand, and cache
misses in tables and pool. Of the full hit 0.13 to 0.21 ms are the hash; reading a list of Python numbers takes 0.4 ms.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from peer_process import PeerError, PeerProcess
from report import Figure, Target, alternate, common_options, publish, scaled

from kvtide.hma import HybridMemoryManager
from kvtide.kvcache import ModelLayout
from kvtide.kvcache.geometry import PageGeometry
from kvtide.kvcache.solver import solve_geometry

MODEL = "gemma-3-27b"
VOCABULARY = 262_144
STEP_TOKENS = 8192
MAX_MODEL_LEN = 131_072
# One full block of a peer's group: 10 layers, 16 tokens, K and V of 16 heads of 128 in bf16.
PEER_BLOCK_BYTES = 10 * 16 * 2 * 16 * 128 * 2
# Decode steps per repetition: a whole cycle of a block, so that every repetition has as many full blocks.
CYCLE = 16
# Cycles after which every block in the window (1,024 tokens) was decoded.
LONG = 66
# Blocks that the peer's seven groups hold of a request of 2,000 tokens, and take while it is prefilled.
PEER_BLOCKS_HELD = 125 + 6 * 65
PEER_BLOCKS_BURST = 7 * 188

Prompt = list[int]
Ids = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sizes:
    """How large a run is."""

    running: int = 1024
    repetitions: int = 9
    hit_tokens: int = 32_768
    full_pool: bool = True
    dense: bool = True
    batches: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    peer_batch: int = 4096
    contexts: tuple[int, ...] = (1024, 16_384, 131_072, 1_048_576)
    context_rows: int = 32
    pool_blocks: int = 10_000_000
    small_pool_blocks: int = 1_000_000
    pool_rows: int = 256
    state_requests: int = 64


FULL = Sizes()
QUICK = Sizes(
    repetitions=3,
    full_pool=False,
    dense=False,
    batches=(16, 256, 4096),
    peer_batch=0,
    contexts=(1024, 1_048_576),
    context_rows=4,
    state_requests=16,
)
SMOKE = Sizes(
    running=16,
    repetitions=1,
    hit_tokens=2048,
    batches=(4, 16),
    peer_batch=16,
    contexts=(1024, 4096),
    context_rows=2,
    pool_blocks=200_000,
    small_pool_blocks=100_000,
    pool_rows=8,
    state_requests=2,
)


class Kvtide:
    """kvtide's side, with the peer's methods."""

    def __init__(self, geometry: PageGeometry, memory: int, requests: int, max_model_len: int = MAX_MODEL_LEN) -> None:
        self._serial = 0
        self._rows: Rows = np.empty(0, dtype=np.int64)
        begin = time.thread_time()
        self.manager = HybridMemoryManager(
            geometry, memory, max_requests=requests + 1, max_model_len=max_model_len, max_step_tokens=STEP_TOKENS
        )
        self.seconds_to_construct = time.thread_time() - begin

    @property
    def num_blocks(self) -> int:
        """Block ids of the pool."""
        return self.manager.pool.num_pages * self.manager.pool.stride

    def start(self, prompts: Sequence[Prompt | Ids]) -> None:
        """Admit and prefill requests, and decode a first token; they keep running."""
        for prompt in prompts:
            row, _ = self._prefill(prompt)
            self._step(np.array([row]), np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int32))
            self._rows = np.append(self._rows, row)

    def decode(self, batch: int, steps: Ids) -> float:
        """CPU seconds per decode step of the first `batch` running requests; `steps` are the tokens they are fed."""
        rows, ones = self._rows[:batch], np.ones(batch, dtype=np.int64)
        begin = time.thread_time()
        for tokens in steps:
            self._step(rows, ones, tokens)
        return (time.thread_time() - begin) / len(steps)

    def serve(self, prompt: Prompt | Ids) -> tuple[float, int]:
        """CPU seconds to admit, prefill and release one prompt, and how many tokens it hit."""
        begin = time.thread_time()
        row, hit = self._prefill(prompt)
        self.manager.release(row)
        return time.thread_time() - begin, hit

    def fill_up(self, work: Workload, tokens: int) -> None:
        """Leave prompts in the cache until every page holds something."""
        while self.manager.pool.free_pages:
            self.serve(work.prompt(tokens))

    def _step(self, rows: Rows, ones: Rows, tokens: Ids) -> None:
        self.manager.reserve(rows, ones)
        self.manager.commit(rows, ones, tokens)

    def _prefill(self, prompt: Prompt | Ids) -> tuple[int, int]:
        self._serial += 1
        row, hit, _ = self.manager.admit(f"r{self._serial}", prompt)
        for done in range(hit, len(prompt), STEP_TOKENS):
            tokens = [min(STEP_TOKENS, len(prompt) - done)]
            self.manager.reserve([row], tokens)
            self.manager.commit([row], tokens)
        return row, hit


class Workload:
    """Random prompts and tokens, the same on every run."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def prompt(self, length: int) -> Prompt:
        """Token ids of one prompt."""
        prompt: Prompt = self.ids(length).tolist()
        return prompt

    def ids(self, length: int) -> Ids:
        """The same as an array."""
        return self._random.integers(0, VOCABULARY, length).astype(np.int32)

    def prompts(self, count: int) -> list[Prompt]:
        """Prompts of 1,000 to 3,000 tokens."""
        return [self.prompt(length) for length in self._random.integers(1000, 3001, count).tolist()]

    def steps(self, batch: int) -> Ids:
        """One sampled token per request and step, for a cycle of steps."""
        return self._random.integers(0, VOCABULARY, (CYCLE, batch)).astype(np.int32)


class Duel:
    """kvtide and, where there is one, the peer with the same requests running in equal memory."""

    def __init__(
        self, geometry: PageGeometry, peer: PeerProcess | None, requests: int, memory: int, *, dense: bool = False
    ) -> None:
        self._peer = peer
        self._work = Workload()
        self._requests = requests
        self.kvtide = Kvtide(geometry, memory, requests)
        if peer is not None:
            peer.call("setup", memory=memory, max_model_len=MAX_MODEL_LEN, max_step_tokens=STEP_TOKENS, dense=dense)
        self._start(requests)

    def _start(self, requests: int) -> None:
        prompts = self._work.prompts(requests)
        self.kvtide.start(prompts)
        if self._peer is not None:
            self._peer.call("start", prompts=prompts)
            self._peer.call("settle")

    def fill(self, count: int) -> None:
        """Leave the cache full of finished prompts."""
        for _ in range(count):
            prompt = self._work.prompt(2000)
            self.kvtide.serve(prompt)
            if self._peer is not None:
                self._peer.call("fill", prompts=[prompt])

    def decode(self, batch: int, repetitions: int) -> list[float | None]:
        """Median seconds of a decode step: kvtide's, the peer's."""
        steps = self._work.steps(batch)
        contestants: list[Callable[[], float] | None] = [partial(self.kvtide.decode, batch, steps), None]
        if self._peer is not None:
            contestants[1] = partial(self._peer.call, "decode", batch=batch, steps=steps.tolist())
        return alternate(repetitions, *contestants)

    def decode_long(self, repetitions: int) -> None:
        """Have kvtide decode on, unmeasured; what a step costs the peer does not depend on the length."""
        for _ in range(repetitions):
            self.kvtide.decode(self._requests, self._work.steps(self._requests))

    def serve(self, prompts: Sequence[Prompt], *, as_array: bool = False) -> tuple[list[float | None], list[int]]:
        """Median seconds to serve one of the prompts, two in a turn: kvtide's, the peer's; and what each side hit last.

        With `as_array` kvtide gets them as arrays, which it takes too; the peer takes lists only.
        """
        own: Iterator[Prompt | Ids] = iter(
            [np.array(prompt, dtype=np.int32) for prompt in prompts] if as_array else prompts
        )
        other = iter(prompts)
        hits = [0, 0]

        def kvtide() -> float:
            seconds, hits[0] = self.kvtide.serve(next(own))
            return seconds

        def peer() -> float:
            assert self._peer is not None
            answer = self._peer.call("serve", prompt=next(other))
            hits[1] = answer["hit"]
            seconds: float = answer["seconds"]
            return seconds

        return alternate(len(prompts) // 2, kvtide, None if self._peer is None else peer), hits

    def cold(self, repetitions: int, *, as_array: bool = False) -> list[float | None]:
        """Median seconds to serve a prompt of 2,000 tokens that nobody has seen."""
        prompts = [self._work.prompt(2000) for _ in range(10 * repetitions)]
        return self.serve(prompts, as_array=as_array)[0]

    def full_hit(self, tokens: int, repetitions: int, *, as_array: bool = False) -> list[float | None]:
        """Median seconds to serve a long prompt of which all blocks but the last are cached."""
        prompt = self._work.prompt(tokens)
        self.serve([prompt] * 2)
        seconds, hits = self.serve([prompt] * (6 * repetitions), as_array=as_array)
        for side, hit in zip(("kvtide", "the peer"), hits if self._peer else hits[:1], strict=False):
            if hit < tokens - 16:
                raise RuntimeError(f"{side} hit {hit} of {tokens} tokens, so this would measure something else")
        return seconds


def peer_figure(name: str, seconds: Sequence[float | None], target: float | None = None, note: str = "") -> Figure:
    """A time in microseconds beside the peer's."""
    own, peer = (scaled(value, 1e6) for value in seconds)
    return Figure(name, own, "µs", peer, None if target is None else Target("ratio", ">=", target), note)


def measure_headline(geometry: PageGeometry, peer: PeerProcess | None, sizes: Sizes) -> list[Figure]:
    """Decode step, cold prompt and full hit, in a pool with free memory."""
    duel = Duel(geometry, peer, sizes.running, roomy_memory(sizes.running))
    gc.freeze()
    repetitions, tokens = sizes.repetitions, sizes.hit_tokens
    cold, hit = "admit, prefill, release 2,000 tokens", f"{tokens:,} tokens, cached"
    figures = [
        peer_figure("decode_step", duel.decode(sizes.running, repetitions), 100, f"{sizes.running} rows"),
        peer_figure("cold_prompt", duel.cold(repetitions), 10, cold),
        peer_figure("cold_prompt_array", duel.cold(repetitions, as_array=True), note=f"{cold}; kvtide gets an array"),
        peer_figure("full_hit", duel.full_hit(tokens, repetitions), 10, hit),
        peer_figure(
            "full_hit_array", duel.full_hit(tokens, repetitions, as_array=True), note=f"{hit}; kvtide gets an array"
        ),
    ]
    duel.decode_long(LONG)
    long = duel.decode(sizes.running, repetitions)
    figures.insert(1, peer_figure("decode_step_long", long, 100, f"{sizes.running} rows, windows of decoded tokens"))
    gc.unfreeze()
    return figures


def measure_dense(geometry: PageGeometry, peer: PeerProcess | None, sizes: Sizes) -> list[Figure]:
    """The headline against a peer that caches every window block."""
    duel = Duel(geometry, peer, sizes.running, roomy_memory(sizes.running), dense=True)
    gc.freeze()
    note = "the peer caches all windows"
    figures = [
        peer_figure("decode_step_dense", duel.decode(sizes.running, sizes.repetitions), note=note),
        peer_figure("cold_prompt_dense", duel.cold(sizes.repetitions), note=note),
        peer_figure("full_hit_dense", duel.full_hit(sizes.hit_tokens, sizes.repetitions), note=note),
    ]
    gc.unfreeze()
    return figures


def roomy_memory(requests: int) -> int:
    """Bytes in which so many requests run, and some prompts stay cached, before anything is evicted."""
    return (requests * PEER_BLOCKS_BURST + 50_000) * PEER_BLOCK_BYTES


def measure_full_pool(geometry: PageGeometry, peer: PeerProcess | None, sizes: Sizes) -> list[Figure]:
    """Decode step and cold prompt when everything that is taken evicts a cached prefix."""
    # Room for the running requests to grow and for one cold prompt, and 200 cached ones.
    room = 200
    memory = (sizes.running * (PEER_BLOCKS_HELD + 30) + room * PEER_BLOCKS_HELD + 2000) * PEER_BLOCK_BYTES
    duel = Duel(geometry, peer, sizes.running, memory)
    duel.fill(3 * room)
    gc.freeze()
    figures = [
        peer_figure("decode_step_full_pool", duel.decode(sizes.running, sizes.repetitions), note="everything evicts"),
        peer_figure("cold_prompt_full_pool", duel.cold(sizes.repetitions), note="everything evicts"),
    ]
    gc.unfreeze()
    if duel.kvtide.manager.pool.free_pages:
        raise RuntimeError(f"kvtide has {duel.kvtide.manager.pool.free_pages} free pages, so nothing was evicted")
    return figures


def measure_batches(geometry: PageGeometry, peer: PeerProcess | None, sizes: Sizes) -> list[Figure]:
    """Decode step by the number of running requests, each number with a manager of its own."""
    figures, times = [], {}
    duels = {}
    for batch in sizes.batches:
        with_peer = batch <= sizes.peer_batch
        duel = Duel(geometry, peer if with_peer else None, batch, roomy_memory(batch))
        duels[batch] = duel
        if with_peer and peer is not None:
            # The peer holds one manager at a time, so these two take turns here.
            own, other = duel.decode(batch, sizes.repetitions)
            figures.append(peer_figure(f"decode_step_{batch}_rows", (own, other)))
    gc.freeze()
    work = Workload()
    results = alternate(
        3 * sizes.repetitions,
        *(partial(duel.kvtide.decode, batch, work.steps(batch)) for batch, duel in duels.items()),
    )
    gc.unfreeze()
    for batch, seconds in zip(duels, results, strict=True):
        assert seconds is not None
        times[batch] = seconds
        if not any(figure.name == f"decode_step_{batch}_rows" for figure in figures):
            figures.append(peer_figure(f"decode_step_{batch}_rows", (seconds, None)))
    low, high = sizes.batches[0], sizes.batches[-1]
    middle = sizes.batches[len(sizes.batches) // 2]
    per_row = {batch: seconds / batch for batch, seconds in times.items()}
    figures.append(
        Figure(
            "row_cost_growth",
            per_row[high] / per_row[middle],
            "×",
            target=Target("value", "<=", 1),
            note=f"cost per row: {high} rows / {middle} rows",
        )
    )
    figures.append(
        Figure(
            "batch_growth",
            times[high] / times[low],
            "×",
            target=Target("value", "<=", high / low),
            note=f"cost of a step: {high} rows / {low} rows",
        )
    )
    return figures


def measure_contexts(geometry: PageGeometry, sizes: Sizes) -> list[Figure]:
    """Decode step of a few rows by context length, in equally wide tables and pools full of cached blocks."""
    longest = max(sizes.contexts) + 4096
    rows = sizes.context_rows
    work = Workload()
    steps = work.steps(rows)
    contestants = []
    for context in sizes.contexts:
        side = Kvtide(geometry, rows * (context // 16 + 2048) * PEER_BLOCK_BYTES, rows, longest)
        # Rows at different places in their blocks, as many full blocks in one cycle as at any other length.
        for number in range(rows):
            side.start([work.ids(context + number % CYCLE)])
        side.fill_up(work, 4096)
        contestants.append(partial(side.decode, rows, steps))
    gc.freeze()
    times = alternate(8 * sizes.repetitions, *contestants)
    gc.unfreeze()
    figures = [
        peer_figure(f"decode_step_context_{context}", (seconds, None), note=f"{rows} rows")
        for context, seconds in zip(sizes.contexts, times, strict=True)
    ]
    assert times[0] is not None
    assert times[-1] is not None
    growth = times[-1] / times[0]
    note = f"cost of a step: {sizes.contexts[-1]:,} / {sizes.contexts[0]:,} tokens of context"
    return [*figures, Figure("context_growth", growth, "×", target=Target("value", "<=", 1.2), note=note)]


def measure_pool(geometry: PageGeometry, sizes: Sizes) -> list[Figure]:
    """A pool of very many blocks beside a small one, both full of cached prefixes."""
    blocks_per_page = max(fmt.blocks_per_page for fmt in geometry.formats)
    rows = sizes.pool_rows
    steps = Workload().steps(rows)
    seconds_to_construct: list[float] = []
    contestants: list[partial[float]] = []
    for blocks in (sizes.small_pool_blocks, sizes.pool_blocks):
        memory = -(-blocks // blocks_per_page) * geometry.page_bytes
        work = Workload()
        seconds_to_construct = []
        for _ in range(min(sizes.repetitions, 3)):
            side = Kvtide(geometry, memory, rows)
            seconds_to_construct.append(side.seconds_to_construct)
        side.start(work.prompts(rows))
        side.fill_up(work, 32_768)
        contestants.append(partial(side.decode, rows, steps))
    gc.freeze()
    small, large = alternate(3 * sizes.repetitions, *contestants)
    gc.unfreeze()
    assert small is not None
    assert large is not None
    note = f"decode step of {rows} rows, everything evicts: {sizes.pool_blocks:,} / {sizes.small_pool_blocks:,} blocks"
    return [
        Figure(
            "pool_construction",
            statistics.median(seconds_to_construct),
            "s",
            target=Target("value", "<", 2),
            note=f"{sizes.pool_blocks:,} blocks",
        ),
        Figure("pool_growth", large / small, "×", target=Target("value", "<=", 1.2), note=note),
    ]


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def own_state(requests: int, tokens: int) -> int:
    """Resident bytes that a manager with these requests running adds; for a fresh process."""
    geometry = solve_geometry(ModelLayout.preset(MODEL))
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCABULARY, tokens).astype(np.int32) for _ in range(requests)]
    # A first manager, so that what libraries allocate once is not counted.
    Kvtide(geometry, 2**30, 1).start([prompts[0][:100]])
    gc.collect()
    before = resident_bytes()
    side = Kvtide(geometry, _state_memory(requests, tokens), requests)
    side.start(prompts)
    gc.collect()
    return resident_bytes() - before


def _state_memory(requests: int, tokens: int) -> int:
    return (requests * (tokens // 16 + 6 * 66) + 7 * (STEP_TOKENS // 16 + 66)) * PEER_BLOCK_BYTES


def measure_state(peer: PeerProcess | None, sizes: Sizes) -> list[Figure]:
    """Bytes of bookkeeping per million tokens of KV, in processes that hold nothing else."""
    if not Path("/proc/self/statm").exists():
        return [Figure("state", None, "MB")]
    requests, tokens = sizes.state_requests, sizes.hit_tokens
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        own = process.submit(own_state, requests, tokens).result()
    other = None
    if peer is not None:
        work = Workload()
        memory = _state_memory(requests, tokens)
        other = peer.call(
            "state",
            prompts=[work.prompt(tokens) for _ in range(requests)],
            memory=memory,
            max_model_len=MAX_MODEL_LEN,
            max_step_tokens=STEP_TOKENS,
        )["bytes"]
    held = requests * tokens
    note = f"resident, per million tokens of KV; {requests} requests of {tokens:,} tokens"
    return [Figure("state", own / held, "MB", scaled(other, 1 / held), note=note)]


def start_peer(python: Path | None) -> AbstractContextManager[PeerProcess | None]:
    """The peer, or None with a line on stderr that says why."""
    if python is None:
        return nullcontext(None)
    try:
        return PeerProcess(python)
    except PeerError as error:
        click.echo(f"no peer: {error}", err=True)
        return nullcontext(None)


@click.command()
@common_options
@click.option("--vllm-python", envvar="KVTIDE_VLLM_PYTHON", type=click.Path(path_type=Path), help="Python with vLLM.")
def main(quick: bool, smoke: bool, json_file: Path | None, vllm_python: Path | None) -> None:
    """Measure what the memory manager itself costs, beside vLLM's."""
    sizes = SMOKE if smoke else QUICK if quick else FULL
    geometry = solve_geometry(ModelLayout.preset(MODEL))
    if vllm_python is None:
        click.echo("no peer: give --vllm-python or KVTIDE_VLLM_PYTHON", err=True)
    # State is measured with a peer of its own, since a process seldom gives memory back.
    with start_peer(vllm_python) as peer:
        state = measure_state(peer, sizes)
    with start_peer(vllm_python if peer else None) as peer:
        figures = [*measure_headline(geometry, peer, sizes), *state]
        if sizes.dense and peer is not None:
            figures += measure_dense(geometry, peer, sizes)
        if sizes.full_pool:
            figures += measure_full_pool(geometry, peer, sizes)
        figures += measure_batches(geometry, peer, sizes)
        figures += measure_contexts(geometry, sizes)
        figures += measure_pool(geometry, sizes)
        versions = peer.versions if peer else {}
    publish("Cost of the memory manager (ratio: how many times less than the peer)", figures, json_file, versions)


if __name__ == "__main__":
    main()
