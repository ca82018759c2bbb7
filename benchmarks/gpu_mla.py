"""MLA decode on a GPU: right first, then how close to what the memory and the matrix units allow, and beside the peers.

    python benchmarks/gpu_mla.py [--quick] [--json FILE]

Needs one CUDA GPU and Triton; without a GPU it says so and every figure is null. Under 8 minutes on an H200, most of
them the compiler's; what does not fit into that time is null and says so.

    check/BACKEND       each backend of `kvtide kernels` that can run, against float64 over a pool with NaN in every
                        unused slot: the worst error, as a share of what its format allows
    copy, matmul        this GPU's own ceilings: bytes read and written by a copy of 4 GiB, bf16 product of 8192 squared
    rows R kv N FORMAT  one decode step of kvtide's Triton kernel, `batch` requests of N tokens, R = heads * q_len query
                        rows each; `peer` is the fastest other backend that can run it (one row of each result is
                        compared with float64 too; here all slots are finite)
    share_of_copy       the worst achieved share of the copy's bandwidth where memory bounds the step (R <= 64, N >= 4k)
    beside_flashmla     the worst ratio to FlashMLA at R 64 and 128, bf16
    q_len_8             the time of 8 query tokens over that of 1, with 8 heads, which memory bounds
    token_cost          the time per KV token at the longest context over that at the shortest, R = 16

The floor of a step is max(bytes / copy bandwidth, flops / matmul rate): latents once, queries and outputs once, 2 *
(576 + 512) flops for each row and token. Times are medians of replays of a CUDA graph between events, with the L2 cache
overwritten before each; a kernel that cannot be captured is timed as it is called, and its note says so.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from report import Figure, Target, common_options, publish

try:
    import torch
    from mla_pool import LATENT, ROPE, MlaCall, Pool, check_calls, error_of_row

    from kvtide.kernels import registry
    from kvtide.kernels.formats import LatentFormat
    from kvtide.kernels.support import Request

    # Of one row and one token: the product with the key and with the value.
    FLOPS = 2 * (LATENT + ROPE + LATENT)
except ModuleNotFoundError:
    torch = None  # type: ignore[assignment]

OURS = "TRITON_MLA"
BATCH = 128
# Heads and query tokens for each number of rows.
SHAPES = {16: (16, 1), 32: (32, 1), 64: (64, 1), 128: (128, 1), 1024: (128, 8)}
TIME_LIMIT = 440.0
COPY_BYTES = 4 * 2**30
MATMUL_SIZE = 8192
# What the versions of a report are asked for.
PEERS = ("sgl-flash-mla", "vllm", "flashinfer-python", "tokenspeed-mla", "flash-attn-4")


@dataclass(frozen=True)
class Sizes:
    """How large a run is."""

    rows: tuple[int, ...] = (16, 32, 64, 128, 1024)
    kv: tuple[int, ...] = (1024, 4096, 16_384, 65_536)
    formats: tuple[str, ...] = ("bfloat16", "fp8_e4m3", "fp8_ds_mla")
    repetitions: int = 15


FULL = Sizes()
QUICK = Sizes(rows=(16, 128), kv=(1024, 16_384), formats=("bfloat16", "fp8_ds_mla"), repetitions=7)


@dataclass
class Bench:
    """A device and its ceilings; `copy` in bytes and `matmul` in flops a second, None until measured."""

    device: torch.device
    repetitions: int
    copy: float | None = None
    matmul: float | None = None
    begin: float = field(default_factory=time.monotonic)

    @property
    def out_of_time(self) -> bool:
        """Whether a new measurement should not be begun."""
        return time.monotonic() - self.begin > TIME_LIMIT

    def floor(self, call: MlaCall, kv: int) -> tuple[float, bool] | None:
        """Seconds that a step takes at the ceilings, and whether memory bounds it."""
        if self.copy is None or self.matmul is None:
            return None
        rows = call.batch * call.heads * call.q_len
        moved = call.batch * kv * call.fmt.token_bytes(LATENT, ROPE) + rows * (LATENT + ROPE + LATENT) * 2
        by_memory, by_flops = moved / self.copy, FLOPS * rows * kv / self.matmul
        return max(by_memory, by_flops), by_memory >= by_flops

    def seconds(self, run: Callable[[], object]) -> tuple[float, bool]:
        """Median seconds of `run` on the device, and whether it could be captured."""
        run()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        captured = True
        try:
            with torch.cuda.graph(graph):
                run()
            replay: Callable[[], object] = graph.replay
        except Exception:
            torch.cuda.synchronize(self.device)
            captured, replay = False, run
        flush = torch.empty(512 * 2**20, dtype=torch.uint8, device=self.device)
        samples = []
        for turn in range(self.repetitions + 2):
            flush.fill_(turn)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(samples[2:]), captured


def runnable(call: MlaCall, finite_unused: bool) -> dict[str, Any]:
    """Every backend that can run a call on a GPU without changing its numbers, and the function to call."""
    return {
        verdict.name: registry.select(call, verdict.name)
        for verdict in _verdicts(call, finite_unused)
        if not verdict.reasons and not verdict.by_name_only
    }


def refused(call: MlaCall) -> list[Figure]:
    """The backends that cannot run a call, and why, so that a missing peer is no riddle."""
    return [
        Figure(f"check/{verdict.name}", None, "of bound", note="; ".join(verdict.reasons or (verdict.by_name_only,)))
        for verdict in _verdicts(call, finite_unused=False)
        if verdict.reasons or verdict.by_name_only
    ]


def _verdicts(call: MlaCall, finite_unused: bool) -> list[registry.Verdict]:
    """What the registry says of the GPU backends."""
    return [v for v in registry.explain(Request.of(call, finite_unused)) if v.name not in ("CPU", "TORCH_REFERENCE")]


def check(bench: Bench) -> list[Figure]:
    """The worst error of every backend that can run."""
    worst: dict[str, float] = {}
    notes: dict[str, str] = {}
    missing: dict[str, Figure] = {}
    for call in check_calls(bench.device):
        missing.update((figure.name, figure) for figure in refused(call))
        for name, decode in runnable(call, finite_unused=False).items():
            call.out.fill_(math.nan)
            call.lse.fill_(math.nan)
            try:
                decode(call)
                error = max(error_of_row(call, row) for row in range(call.batch))
            except Exception as problem:
                error, notes[name] = math.inf, _words(problem)
            if error > worst.get(name, -1.0):
                worst[name] = error
                notes.setdefault(name, "")
                if error > 1 and not notes[name]:
                    notes[name] = f"{call.fmt.value}, {call.heads} heads, q_len {call.q_len}"
    ran = [
        # JSON has no infinity.
        Figure(f"check/{name}", min(error, 1e9), "of bound", target=Target("value", "<=", 1), note=notes[name])
        for name, error in worst.items()
    ]
    return [*ran, *(figure for name, figure in missing.items() if name not in {figure.name for figure in ran})]


def ceilings(bench: Bench) -> list[Figure]:
    """What this GPU's memory and matrix units reach."""
    bench.copy = _copy_bandwidth(bench)
    bench.matmul = _matmul_rate(bench)
    return [
        Figure("copy", bench.copy / 1e12, "TB/s", note="read and written"),
        Figure("matmul", bench.matmul / 1e12, "TFLOP/s", note="bf16"),
    ]


def _copy_bandwidth(bench: Bench) -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=bench.device)
    copy = torch.empty_like(source)
    seconds, _ = bench.seconds(lambda: copy.copy_(source))
    return 2 * COPY_BYTES / seconds


def _matmul_rate(bench: Bench) -> float:
    left = torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device=bench.device)
    product = torch.empty_like(left)
    seconds, _ = bench.seconds(lambda: torch.mm(left, left, out=product))
    return 2 * MATMUL_SIZE**3 / seconds


@dataclass(frozen=True)
class Step:
    """One timed configuration: seconds by backend, and the share of the floor that kvtide's kernel reaches."""

    rows: int
    kv: int
    fmt: str
    seconds: dict[str, float]
    share: float | None
    memory_bound: bool
    note: str

    @property
    def ours(self) -> float | None:
        """Seconds of kvtide's kernel."""
        return self.seconds.get(OURS)

    def figure(self) -> Figure:
        """As it is reported."""
        peers = [seconds for name, seconds in self.seconds.items() if name != OURS]
        peer = min(peers) * 1e6 if peers else None
        return Figure(f"rows {self.rows} kv {self.kv} {self.fmt}", _micro(self.ours), "us", peer, note=self.note)


def time_step(bench: Bench, pool: Pool, rows: int, shape: tuple[int, int], kv: int) -> Step:
    """Time every backend that can run one configuration."""
    if bench.out_of_time:
        return Step(rows, kv, pool.fmt.value, {}, None, False, "out of time")
    seconds: dict[str, float] = {}
    notes = []
    share, memory_bound = None, False
    try:
        call = pool.call(BATCH, *shape, kv)
        for name, decode in runnable(call, finite_unused=True).items():
            try:
                seconds[name], captured = bench.seconds(lambda decode=decode: decode(call))
                notes.append(f"{name} {seconds[name] * 1e6:,.0f} us{'' if captured else ' (not captured)'}")
                if (error := error_of_row(call, BATCH - 1)) > 1:
                    notes.append(f"{name} is WRONG by {error:.3g} bounds")
                    if name != OURS:
                        del seconds[name]
            except Exception as problem:
                notes.append(f"{name}: {_words(problem)}")
        floor = bench.floor(call, kv)
        if floor is not None and OURS in seconds:
            share, memory_bound = floor[0] / seconds[OURS], floor[1]
            notes.insert(0, f"{share:.0%} of the {'memory' if memory_bound else 'matmul'} floor")
    except Exception as problem:
        notes.append(_words(problem))
    return Step(rows, kv, pool.fmt.value, seconds, share, memory_bound, "; ".join(notes))


def goals(steps: Sequence[Step], one: Step | None, eight: Step | None) -> list[Figure]:
    """The issue's bounds, each at its worst configuration."""
    bound = [s for s in steps if s.share is not None and s.memory_bound and s.rows <= 64 and s.kv >= 4096]
    worst = min(bound, key=lambda s: s.share or 0, default=None)
    beside = [s for s in steps if s.rows in (64, 128) and s.fmt == "bfloat16" and {OURS, "FLASHMLA"} <= set(s.seconds)]
    slowest = min(beside, key=lambda s: s.seconds["FLASHMLA"] / s.seconds[OURS], default=None)
    costs = [s for s in steps if s.rows == 16 and s.fmt == "bfloat16" and s.ours is not None]
    growth = None
    if len(costs) > 1:
        growth = ((costs[-1].ours or 0) / costs[-1].kv) / ((costs[0].ours or 1) / costs[0].kv)
    ratio = eight.ours / one.ours if one and eight and one.ours and eight.ours else None
    return [
        Figure(
            "share_of_copy",
            worst.share if worst else None,
            "fraction",
            target=Target("value", ">=", 0.85),
            note=worst.figure().name if worst else "",
        ),
        Figure(
            "beside_flashmla",
            _micro(slowest.ours) if slowest else None,
            "us",
            _micro(slowest.seconds["FLASHMLA"]) if slowest else None,
            Target("ratio", ">=", 1),
            slowest.figure().name if slowest else "",
        ),
        Figure("q_len_8", ratio, "of q_len 1", target=Target("value", "<=", 1.3), note="8 heads, bf16"),
        Figure("token_cost", growth, "of the shortest", target=Target("value", "<", 1)),
    ]


def measure(bench: Bench, sizes: Sizes) -> list[Figure]:
    """Everything on one GPU."""
    figures = [*check(bench), *ceilings(bench)]
    steps: list[Step] = []
    one = eight = None
    for name in sizes.formats:
        try:
            pool = Pool(bench.device, LatentFormat(name), BATCH * max(sizes.kv))
        except torch.OutOfMemoryError as problem:
            figures.append(Figure(f"pool {name}", None, "us", note=_words(problem)))
            continue
        for rows in sizes.rows:
            for kv in sizes.kv:
                steps.append(time_step(bench, pool, rows, SHAPES[rows], kv))
        if name == "bfloat16":
            context = min(16_384, max(sizes.kv))
            one, eight = (time_step(bench, pool, 8 * q_len, (8, q_len), context) for q_len in (1, 8))
        del pool
        torch.cuda.empty_cache()
    return [*figures, *(step.figure() for step in steps), *goals(steps, one, eight)]


def absent(sizes: Sizes) -> list[Figure]:
    """The figures of a machine without a GPU."""
    steps = [Step(r, kv, fmt, {}, None, False, "") for fmt in sizes.formats for r in sizes.rows for kv in sizes.kv]
    return [
        Figure(f"check/{OURS}", None, "of bound", target=Target("value", "<=", 1)),
        Figure("copy", None, "TB/s"),
        Figure("matmul", None, "TFLOP/s"),
        *(step.figure() for step in steps),
        *goals(steps, None, None),
    ]


def versions(device: Any) -> dict[str, str]:
    """The GPU, and the packages whose kernels take part."""
    found = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__}
    for package in ("triton", *PEERS):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def _words(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:120]}"


@click.command()
@common_options
def main(quick: bool, smoke: bool, json_file: Path | None) -> None:
    """Check and time MLA decode on this GPU."""
    sizes = QUICK if quick or smoke else FULL
    title = f"kvtide MLA decode, batch {BATCH}, one layer (peer: the fastest other backend)"
    if torch is None or not torch.cuda.is_available():
        click.echo(f"no {'torch' if torch is None else 'CUDA device'} here: nothing is measured", err=True)
        publish(title, absent(sizes), json_file)
        return
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    publish(title, measure(Bench(device, sizes.repetitions), sizes), json_file, versions(device))


if __name__ == "__main__":
    main()
