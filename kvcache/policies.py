"""The allocation policies that a comparison can name: kvtide's own and the published baselines."""

from __future__ import annotations

from collections.abc import Callable

from .baselines import grouped_geometry, lcm_geometry, uniform_geometry
from .errors import ConfigError
from .geometry import PageGeometry
from .layout import ModelLayout
from .solver import solve_geometry

POLICIES: dict[str, Callable[[ModelLayout, int], PageGeometry]] = {
    "uniform": uniform_geometry,
    "grouped": grouped_geometry,
    "lcm": lcm_geometry,
    "kvtide": solve_geometry,
}


def plan_geometry(policy: str, layout: ModelLayout, block_size: int = 16) -> PageGeometry:
    """The geometry of one policy by name; `ConfigError` lists the names."""
    try:
        plan = POLICIES[policy]
    except KeyError:
        raise ConfigError(f"policy {policy!r} is not known; allowed: {', '.join(POLICIES)}") from None
    return plan(layout, block_size)
