"""The waste simulator: its own cost, and what it finds for six models under all four policies.

    python benchmarks/waste.py [--quick] [--json FILE]

Needs `traces/mooncake/synthetic_trace.jsonl` (3,993 requests, 61 M tokens) in the folder that `KVTIDE_SHARED` names, by
default `shared` beside the repository; without it every figure is null.

    cli_cpu, cli_memory    user and system CPU seconds, and peak resident memory, of the command
                           `kvtide waste --model gemma-3-27b --trace FILE --json`, run as a process of its own
    MODEL/POLICY           the share of allocated bytes that the last token's query does not need, each request at its
                           final length; for kvtide, `peer` is the best of the three published policies on that model,
                           and a second figure counts what is above the target of 1 %

The published policies (uniform blocks, equal groups with padding as in vLLM, LCM pages as in Jenga) are kvtide's own
models of them, checked against published figures in `tests/`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click
from report import Figure, Target, common_options, publish

SHARED = Path(os.environ.get("KVTIDE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
TRACE = SHARED / "traces" / "mooncake" / "synthetic_trace.jsonl"
POLICIES = ("uniform", "grouped", "lcm", "kvtide")
MODELS = ("gemma-3-27b", "mimo-v2-flash", "step-3.5-flash", "gpt-oss-120b", "gemma-4-31b", "qwen3.5-27b")
# Its recurrent states are larger than one percent of most requests; all others can stay below.
WITHOUT_LIMIT = ("qwen3.5-27b",)
LIMIT = 0.01


class Run(NamedTuple):
    """One run of the command."""

    cpu_seconds: float
    peak_bytes: int
    report: dict[str, Any]


def run_command(model: str, num_requests: int | None = None) -> Run:
    """Run `kvtide waste` as a process and account it. `RuntimeError` with its message when it fails."""
    arguments = ["waste", "--model", model, "--trace", str(TRACE), "--policy", ",".join(POLICIES), "--json"]
    if num_requests is not None:
        arguments += ["--num-requests", str(num_requests)]
    process = subprocess.Popen(
        [Path(sys.executable).with_name("kvtide"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    # Its answer is one short line, so that the pipes cannot fill up on one side.
    output, complaint = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    process.stderr.close()
    if process.returncode:
        raise RuntimeError(f"kvtide waste failed: {complaint.strip()}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit, json.loads(output))


def measure_command(repetitions: int, num_requests: int | None) -> list[Figure]:
    """CPU and memory of the command."""
    runs = [run_command(MODELS[0], num_requests) for _ in range(repetitions)] if TRACE.is_file() else []
    seconds = statistics.median(run.cpu_seconds for run in runs) if runs else None
    peak = max(run.peak_bytes for run in runs) / 2**20 if runs else None
    note = f"{runs[0].report['requests']:,} requests, {runs[0].report['total_tokens']:,} tokens" if runs else ""
    return [
        Figure("cli_cpu", seconds, "s", target=Target("value", "<", 5), note=note),
        Figure("cli_memory", peak, "MiB", target=Target("value", "<", 300), note="peak resident"),
    ]


def measure_waste(models: tuple[str, ...], num_requests: int | None) -> list[Figure]:
    """The waste of each model under each policy."""
    figures = []
    for model in models:
        policies = run_command(model, num_requests).report["policies"] if TRACE.is_file() else {}
        wastes = {policy: policies.get(policy, {}).get("waste_fraction") for policy in POLICIES}
        published = [wastes[policy] for policy in POLICIES[:-1] if wastes[policy] is not None]
        figures += [Figure(f"{model}/{policy}", wastes[policy], "fraction") for policy in POLICIES[:-1]]
        best = min(published, default=None)
        causes = policies.get("kvtide", {}).get("by_cause", {})
        allocated = sum(causes.values())
        figures.append(
            Figure(
                f"{model}/kvtide",
                wastes["kvtide"],
                "fraction",
                best,
                Target("ratio", ">", 1),
                ", ".join(
                    f"{cause.replace('_', ' ')} {part / allocated:.2%}"
                    for cause, part in causes.items()
                    if part and cause != "needed"
                ),
            )
        )
        if model not in WITHOUT_LIMIT:
            figures.append(
                Figure(f"{model}/kvtide_limit", wastes["kvtide"], "fraction", target=Target("value", "<=", LIMIT))
            )
    return figures


@click.command()
@common_options
def main(quick: bool, smoke: bool, json_file: Path | None) -> None:
    """Measure the waste simulator, and the waste that it finds."""
    if not TRACE.is_file():
        click.echo(f"no trace {TRACE}: set KVTIDE_SHARED to the folder that holds traces/", err=True)
    num_requests = 100 if smoke else None
    figures = measure_command(1 if smoke else 3 if quick else 9, num_requests)
    figures += measure_waste(MODELS[:1] if smoke else MODELS, num_requests)
    publish("kvtide waste on the Mooncake synthetic trace (peer: the best published policy)", figures, json_file)


if __name__ == "__main__":
    main()
