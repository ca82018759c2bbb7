"""`kvtide calibrate`: fit the cost model to a recorded run, and try it on another."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from kvtide.kvcache import ConfigError
from kvtide.sims.serving.build import Deployment
from kvtide.sims.serving.calibrate import RecordedRun, deployment_of, fit, read_run, relative_errors, simulate_run
from kvtide.sims.serving.gpus import GpuSpec, gpu_of

from .deployment import load_work
from .options import console, json_option, load_layout, print_json


@click.command("calibrate")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--model", required=True, help="The config.json of the model that was run.")
@click.option("--gpu", required=True, help="The device that it ran on.")
@click.option("--check", type=click.Path(path_type=Path), help="Another recorded run on that device, to predict.")
@click.option("--check-model", help="The config.json of the other run's model; by default the same.")
@json_option
def command(run_dir: Path, model: str, gpu: str, check: Path | None, check_model: str | None, as_json: bool) -> None:
    """Fit the cost model's efficiencies to a recorded run: a folder of meta.json and requests.jsonl.

    \b
    Examples:
      kvtide calibrate RUN_DIR --model config.json --gpu h100 --json > calibration.json
      kvtide calibrate RUN_DIR --model config.json --gpu h100 --check OTHER_DIR --check-model other/config.json
    """
    if check_model is not None and check is None:
        raise ConfigError("--check-model is the model of another run; give --check")
    device, _ = gpu_of(gpu)
    run, deployment = _load(run_dir, model, device)
    other = None if check is None else _load(check, check_model or model, device)
    result = fit(run, deployment)
    errors = {run.name: result.errors}
    if other is not None:
        prediction = simulate_run(other[0], replace(other[1], efficiency=result.efficiency))
        errors[f"{other[0].name} (predicted)"] = relative_errors(prediction, other[0].measured)
    if as_json:
        print_json({"gpu": device.name, "efficiency": asdict(result.efficiency), "errors": errors})
    else:
        _print(device, asdict(result.efficiency), errors, result.simulations)


def _load(folder: Path, model: str, gpu: GpuSpec) -> tuple[RecordedRun, Deployment]:
    run = read_run(folder)
    layout = load_layout(model, "auto", 1, None)
    return run, deployment_of(run, layout, load_work(model, layout), gpu)


def _print(gpu: GpuSpec, efficiency: dict[str, Any], errors: dict[str, dict[str, float]], simulations: int) -> None:
    out = console()
    table = Table(title=f"simulated against measured, {gpu.name}, {simulations} simulations", title_justify="left")
    table.add_column("figure")
    for name in errors:
        table.add_column(name, justify="right")
    for figure in next(iter(errors.values())):
        table.add_row(figure, *(f"{run[figure]:+.1%}" for run in errors.values()))
    out.print(table)
    out.print("efficiency  " + ", ".join(f"{name} {value:.4g}" for name, value in efficiency.items()))
