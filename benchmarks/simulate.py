"""The serving simulator: what a simulated request and step cost, a day of a million requests, hit rates beside a peer.

    python benchmarks/simulate.py [--quick] [--json FILE] [--requests N]

    mooncake_cpu, _memory      user and system CPU seconds, and peak resident memory, of the command `kvtide simulate`
                               on the Mooncake synthetic trace (3,993 requests, 61 M tokens), Qwen3-32B on 4 H200
    mooncake_step, _request    the same run, inside the simulation: per simulated step, and per request
    day_request, day_step      CPU time of the command on the first N requests of a generated day of a million
                               chats (all by default, 4,000 with --quick); Qwen3-30B-A3B on one A100. 900 us each
                               are 15 minutes
    day_memory                 peak resident memory of that command; the target is for the whole day
    hit_rates                  LRU hit rates of the Mooncake trace for six cache sizes, reading the trace included;
                               peer: `kvcache-simulator` (PyPI) on its Python path. The rates must agree

The configs and the trace come from the folder that `KVTIDE_SHARED` names, by default `shared` beside the repository;
`KVTIDE_KVCACHE_SIMULATOR_PYTHON` names the Python of an environment that has `kvcache-simulator`. What is absent leaves
its figures null. Everything runs on one core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from report import Figure, Target, alternate, common_options, publish, scaled

from kvtide.sims.hit_rates import lru_hit_curve
from kvtide.sims.traces import open_trace

SHARED = Path(os.environ.get("KVTIDE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
TRACE = SHARED / "traces" / "mooncake" / "synthetic_trace.jsonl"
MOONCAKE = ("Qwen--Qwen3-32B.json", "h200:4")
DAY = ("Qwen--Qwen3-30B-A3B.json", "a100")
DAY_REQUESTS, DAY_S = 1_000_000, 86_400
SYSTEM_PROMPTS, BLOCK = 8, 512
# From a little more than the longest prompt to a third of all blocks of the trace.
CACHE_BLOCKS = (400, 1000, 2000, 4000, 8000, 16000)
PEER = """
import json, sys, time
from importlib.metadata import version
from kvcache_sim.plan import build_execution_plan
from kvcache_sim.policies import simulate_policy
from kvcache_sim.trace import parse_trace_file
begin = time.process_time()
plan = build_execution_plan(parse_trace_file(sys.argv[1], block_size=512))
rates = [simulate_policy(plan, "lru", int(size)).hitRate for size in sys.argv[2:]]
print(json.dumps({"cpu_s": time.process_time() - begin, "rates": rates, "version": version("kvcache-simulator")}))
"""


class Run(NamedTuple):
    """One run of the command: what it took, and its report."""

    cpu_seconds: float
    peak_bytes: int
    report: dict[str, Any]


def run_command(model: str, gpu: str, trace: Path, *flags: str) -> Run:
    """Run `kvtide simulate` as a process and account it. `RuntimeError` with its message when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        arguments = ["simulate", "--model", str(SHARED / "model_configs" / model), "--gpu", gpu, "--trace", str(trace)]
        process = subprocess.Popen(
            [Path(sys.executable).with_name("kvtide"), *arguments, "--json", str(report), *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        assert process.stderr is not None
        complaint = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        process.stderr.close()
        if process.returncode:
            raise RuntimeError(f"kvtide simulate failed: {complaint.strip()}")
        unit = 1 if sys.platform == "darwin" else 1024
        return Run(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit, json.loads(report.read_text()))


def measure_mooncake(num_requests: int | None) -> list[Figure]:
    """The command on the Mooncake trace."""
    limit = [] if num_requests is None else ["--num-requests", str(num_requests)]
    run = run_command(*MOONCAKE, TRACE, "--max-model-len", "262144", *limit) if TRACE.is_file() else None
    report = run.report if run else {}
    step = run.cpu_seconds / report["steps"] if run else None
    request = run.cpu_seconds / report["requests"] if run else None
    note = f"{report['requests']:,} requests, {report['steps']:,} steps, Qwen3-32B on 4 x h200" if run else ""
    return [
        Figure("mooncake_cpu", run.cpu_seconds if run else None, "s", target=Target("value", "<", 30), note=note),
        Figure("mooncake_memory", run.peak_bytes / 2**20 if run else None, "MiB", note="peak resident"),
        Figure("mooncake_step", scaled(step, 1e6), "us", note="CPU time per simulated step"),
        Figure("mooncake_request", scaled(request, 1e6), "us", note="CPU time per request"),
    ]


def generate_day(num_requests: int) -> Iterator[str]:
    """The first requests of a day of chats as lines of a trace: a wave of arrivals, system prompts, heavy tails."""
    random = np.random.default_rng(0)
    # The rate follows the hour, 40 % above the mean at its peak; times are its integral inverted.
    hours = np.linspace(0, DAY_S, 1441)
    arrived = np.cumsum(1 + 0.4 * np.sin(2 * np.pi * (hours / DAY_S - 0.3)))
    uniform = np.sort(random.random(DAY_REQUESTS))[:num_requests]
    times = np.interp(uniform * (arrived[-1] - arrived[0]) + arrived[0], arrived, hours)
    system = random.integers(0, 2 * SYSTEM_PROMPTS, num_requests)  # half of the requests have one
    said = np.clip(random.lognormal(5.0, 1.0, num_requests), 8, 4000).astype(int)
    answers = np.clip(random.lognormal(4.5, 0.8, num_requests), 1, 1500).astype(int)
    fresh = SYSTEM_PROMPTS
    for at, shared, own, answer in zip(times.tolist(), system.tolist(), said.tolist(), answers.tolist(), strict=True):
        ids = [shared] if shared < SYSTEM_PROMPTS else []
        length = len(ids) * BLOCK + own
        while len(ids) * BLOCK < length:
            ids.append(fresh)
            fresh += 1
        row = {"timestamp": int(1000 * at), "input_length": length, "output_length": answer, "hash_ids": ids}
        yield json.dumps(row) + "\n"


def measure_day(num_requests: int) -> list[Figure]:
    """The command on a generated day, or on its first requests."""
    run = None
    if (SHARED / "model_configs" / DAY[0]).is_file():
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "day.jsonl"
            with trace.open("w") as file:
                file.writelines(generate_day(num_requests))
            run = run_command(*DAY, trace, "--trace-format", "mooncake", "--max-model-len", "8192")
    report = run.report if run else {}
    running = sum(point["running"] * point["steps"] for point in report["series"]) / report["steps"] if run else 0
    note = (
        f"{report['requests']:,} requests, {report['steps']:,} steps, {running:,.0f} running on average" if run else ""
    )
    memory = run.peak_bytes / 2**30 if run else None
    whole = Target("value", "<", 4) if num_requests == DAY_REQUESTS else None
    request = run.cpu_seconds / report["requests"] if run else None
    step = run.cpu_seconds / report["steps"] if run else None
    return [
        Figure("day_request", scaled(request, 1e6), "us", target=Target("value", "<", 900), note=note),
        Figure("day_step", scaled(step, 1e6), "us", note="CPU time per simulated step"),
        Figure("day_memory", memory, "GiB", target=whole, note="peak resident"),
    ]


def measure_hit_rates(repetitions: int) -> tuple[list[Figure], dict[str, str]]:
    """kvtide's one pass for all cache sizes beside the peer's simulation of each; the figures, and peers' versions."""
    target = Target("ratio", ">=", 1)
    if not TRACE.is_file():
        return [Figure("hit_rates", None, "ms", None, target)], {}
    python = os.environ.get("KVTIDE_KVCACHE_SIMULATOR_PYTHON")
    answers: list[dict[str, Any]] = []
    rates: list[float] = []

    def ours() -> float:
        begin = time.process_time()
        curve = lru_hit_curve(list(open_trace(TRACE)), warmup=0.5)
        rates[:] = [curve.hit_rate(size) for size in CACHE_BLOCKS]
        return time.process_time() - begin

    def theirs() -> float:
        assert python is not None
        done = subprocess.run(
            [python, "-c", PEER, TRACE, *map(str, CACHE_BLOCKS)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"kvcache-simulator failed: {done.stderr.strip().splitlines()[-1]}")
        answers.append(json.loads(done.stdout))
        return float(answers[-1]["cpu_s"])

    mine, peer = alternate(repetitions, ours, theirs if python else None)
    note = ", ".join(f"{rate:.1%} of {size:,}" for size, rate in zip(CACHE_BLOCKS, rates, strict=True))
    versions = {}
    if answers:
        versions["kvcache-simulator"] = answers[-1]["version"]
        if not np.allclose(rates, answers[-1]["rates"], rtol=1e-12):
            raise RuntimeError(f"hit rates differ: {rates} here, {answers[-1]['rates']} from kvcache-simulator")
    return [Figure("hit_rates", scaled(mine, 1e3), "ms", scaled(peer, 1e3), target, f"blocks: {note}")], versions


@click.command()
@common_options
@click.option("--requests", type=click.IntRange(1, DAY_REQUESTS), help="Requests of the day to simulate.")
def main(quick: bool, smoke: bool, json_file: Path | None, requests: int | None) -> None:
    """Measure the serving simulator."""
    if not TRACE.is_file():
        click.echo(f"no trace {TRACE}: set KVTIDE_SHARED to the folder that holds traces/", err=True)
    if "KVTIDE_KVCACHE_SIMULATOR_PYTHON" not in os.environ:
        click.echo("no peer: KVTIDE_KVCACHE_SIMULATOR_PYTHON names no Python with kvcache-simulator", err=True)
    figures = measure_mooncake(50 if smoke else 500 if quick else None)
    figures += measure_day(requests or (100 if smoke else 4_000 if quick else DAY_REQUESTS))
    rates, versions = measure_hit_rates(1 if smoke else 3)
    publish("kvtide serving simulator, one core", [*figures, *rates], json_file, versions)


if __name__ == "__main__":
    main()
