"""Fit the cost model's efficiencies to a recorded run, and say how far off it is on that run or another.

A recorded run is a folder as LLMServingSim writes it: `meta.json` with vLLM's arguments, `requests.jsonl` with what was
asked and when tokens came. The run is simulated with its own flags; a damped Gauss-Newton search in the logarithms of
the efficiencies brings the logarithms of makespan, TTFT and TPOT together. What a run cannot tell apart (a link that
was not used) stays at its default, because a weak pull towards the defaults is part of what is minimised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import ConfigError, ModelLayout, TraceError

from ..traces import Request
from ..traces.fields import count, seconds, value_of
from ..traces.tracefile import TraceFile, show
from .build import Deployment
from .cost import Efficiency, Parallel
from .engine import Run
from .gpus import GpuSpec
from .measures import Measures, measure
from .work import ModelWork

Floats = npt.NDArray[np.float64]

FITTED = ("compute", "memory", "link")
ROUNDS = 4
# How much a factor of e away from the default weighs against a factor of e in a figure.
PULL = 0.02
STEP = 0.05
LOW, HIGH = 0.02, 1.0
_MAX_ARGUMENT = 2**31 - 1


class RecordedRun(NamedTuple):
    """A real run: vLLM's arguments, the requests as they were sent, and what was measured."""

    name: str
    arguments: Mapping[str, Any]
    requests: list[Request]
    measured: Measures


class _Row(NamedTuple):
    """One recorded request: tokens of prompt and output, and moments in seconds of one clock."""

    name: str
    prompt: int
    output: int
    queued: float
    first: float
    last: float


class Fit(NamedTuple):
    """Efficiencies, and the relative error of every figure of the run they were fitted to."""

    efficiency: Efficiency
    errors: dict[str, float]
    simulations: int


def read_run(folder: Path) -> RecordedRun:
    """Read a recorded run; `TraceError` names the file, and the line, that cannot be read."""
    meta = TraceFile(folder / "meta.json").document()
    arguments = meta.get("engine_kwargs") if isinstance(meta, dict) else None
    if not isinstance(arguments, dict):
        raise TraceError(f"{folder / 'meta.json'}: is no JSON object with engine_kwargs")
    file = TraceFile(folder / "requests.jsonl")
    rows = [_row(row, file) for row in file.objects()]
    if not rows:
        raise TraceError(f"{folder / 'requests.jsonl'}: has no requests")
    begin = min(row.queued for row in rows)
    # Requests reach the engine when they are queued, a little after the client sent them.
    requests = [Request(row.name, row.queued - begin, row.prompt, row.output) for row in rows]
    measured = measure(
        max(row.last for row in rows) - begin,
        [row.first - row.queued for row in rows],
        [(row.last - row.first) / (row.output - 1) for row in rows if row.output > 1],
    )
    return RecordedRun(folder.name, arguments, requests, measured)


def _row(row: Mapping[str, Any], file: TraceFile) -> _Row:
    name, prompt, output, *moments = (
        value_of(row, key, file)
        for key in ("request_id", "input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")
    )
    queued, first, last = (seconds(moment, "a time of a request", file) for moment in moments)
    if not queued <= first <= last:
        raise file.error(f"the first token at {first} and the last at {last} do not follow the queueing at {queued}")
    return _Row(str(name), count(prompt, "input_toks", file), count(output, "output_toks", file), queued, first, last)


def _argument(run: RecordedRun, name: str) -> int | None:
    value = run.arguments.get(name)
    if value is not None and (type(value) is not int or not 1 <= value <= _MAX_ARGUMENT):
        raise TraceError(f"{run.name}: {name} is {show(value)}, but must be a whole number from 1 to {_MAX_ARGUMENT}")
    return value


def deployment_of(run: RecordedRun, layout: ModelLayout, work: ModelWork, gpu: GpuSpec) -> Deployment:
    """The deployment that a run's arguments describe."""
    data = _argument(run, "data_parallel_size") or 1
    if data > 1 and not run.arguments.get("enable_expert_parallel"):
        raise ConfigError(f"{run.name}: data-parallel ranks without expert parallelism are engines of their own")
    return Deployment(
        layout,
        work,
        gpu,
        Parallel(_argument(run, "tensor_parallel_size") or 1, data),
        policy="grouped",
        max_model_len=_argument(run, "max_model_len"),
        max_num_seqs=_argument(run, "max_num_seqs"),
        max_num_batched_tokens=_argument(run, "max_num_batched_tokens"),
    )


def simulate_run(run: RecordedRun, deployment: Deployment) -> Measures:
    """What the simulator says of the recorded requests."""
    return measure_run(deployment.engine().run(run.requests))


def measure_run(result: Run) -> Measures:
    """The measures of a simulated run."""
    return measure(
        result.makespan_s,
        [item.ttft_s for item in result.served],
        [tpot for item in result.served if (tpot := item.tpot_s) is not None],
    )


def relative_errors(simulated: Measures, measured: Measures) -> dict[str, float]:
    """Simulated / measured − 1, by figure."""
    real = measured.named()
    return {name: value / real[name] - 1 for name, value in simulated.named().items()}


def fit(run: RecordedRun, deployment: Deployment, on_simulation: Callable[[], None] = lambda: None) -> Fit:
    """Fit the efficiencies to one run. Deterministic; about 16 simulations."""
    start = np.array([math.log(getattr(deployment.efficiency, name)) for name in FITTED])
    count = 0

    def errors_at(point: Floats) -> dict[str, float]:
        nonlocal count
        count += 1
        on_simulation()
        chosen = dict(zip(FITTED, np.exp(point).tolist(), strict=True))
        trial = replace(deployment, efficiency=replace(deployment.efficiency, **chosen))
        return relative_errors(simulate_run(run, trial), run.measured)

    def residuals(errors: Mapping[str, float]) -> Floats:
        return np.array([math.log1p(error) for error in errors.values()])

    point, errors = start, errors_at(start)
    best = (float((residuals(errors) ** 2).sum()), point, errors)
    for _ in range(ROUNDS):
        base = residuals(errors)
        slopes = np.empty((len(base), len(FITTED)))
        for column in range(len(FITTED)):
            # Away from the upper bound, so that the trial is a valid efficiency.
            shift = -STEP if point[column] + STEP > math.log(HIGH) else STEP
            moved = point.copy()
            moved[column] += shift
            slopes[:, column] = (residuals(errors_at(moved)) - base) / shift
        matrix = np.vstack([slopes, PULL * np.eye(len(FITTED))])
        target = np.concatenate([-base, PULL * (start - point)])
        change = np.clip(np.linalg.lstsq(matrix, target, rcond=None)[0], -0.7, 0.7)
        point = np.clip(point + change, math.log(LOW), math.log(HIGH))
        errors = errors_at(point)
        loss = float((residuals(errors) ** 2).sum())
        if loss < best[0]:
            best = (loss, point, errors)
        if np.abs(change).max() < 0.01:
            break
    chosen = dict(zip(FITTED, np.exp(best[1]).tolist(), strict=True))
    return Fit(replace(deployment.efficiency, **chosen), best[2], count)
