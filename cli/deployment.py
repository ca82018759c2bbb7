"""Options of `kvtide simulate` and `kvtide calibrate` that describe the model and its devices."""

from __future__ import annotations

from pathlib import Path

from kvtide.kvcache import ConfigError, ModelLayout
from kvtide.kvcache.documents import read_json
from kvtide.sims.serving.cost import Efficiency
from kvtide.sims.serving.work import ModelWork, estimate_work, read_work

EFFICIENCIES = ("compute", "memory", "link", "overhead_s", "per_request_s")


def load_work(
    model: str,
    layout: ModelLayout,
    params: float | None = None,
    active_params: float | None = None,
    bytes_per_param: float | None = None,
) -> ModelWork:
    """The model's costs: from its config.json, or estimated from `--params` where there is only a layout."""
    if params is not None:
        active = None if active_params is None else active_params * 1e9
        return estimate_work(layout, params * 1e9, active, 2.0 if bytes_per_param is None else bytes_per_param)
    if active_params is not None:
        raise ConfigError("--active-params says how many of --params are active; give both")
    if bytes_per_param is not None:
        raise ConfigError("--bytes-per-param says how large each of --params is; give both")
    path = Path(model)
    if path.is_dir() or path.suffix == ".json":
        return read_work(read_json(path, "config.json").data)
    raise ConfigError(
        f"--model {model[:80]} says nothing of the model's weights, only of its KV cache; give its config.json, or "
        "--params in billions"
    )


def load_efficiency(path: str | None) -> Efficiency:
    """The file that `kvtide calibrate --json` wrote, or the defaults."""
    if path is None:
        return Efficiency()
    document = read_json(path, "calibration.json")
    values = document.data.get("efficiency")
    if not isinstance(values, dict) or set(values) != set(EFFICIENCIES):
        raise ConfigError(f"{document.label}: has no efficiency with {', '.join(EFFICIENCIES)}")
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values.values()):
        raise ConfigError(f"{document.label}: an efficiency is no number")
    return Efficiency(**values)
