"""The allocation policies that a comparison can name: kvtide's own and the published baselines."""

from __future__ import annotations

from collections.abc import Callable

from .baselines import grouped_geometry, lcm_geometry, uniform_geometry
from .errors import ConfigError
from .geometry import PageGeometry
from .layout import ModelLayout
from .solver import MIN_BLOCK_SIZE, solve_geometry

POLICIES: dict[str, Callable[[ModelLayout, int], PageGeometry]] = {
    "uniform": uniform_geometry,
    "grouped": grouped_geometry,
    "lcm": lcm_geometry,
    "kvtide": solve_geometry,
}


def plan_geometry(
    policy: str, layout: ModelLayout, block_size: int = 16, *, min_block_size: int = MIN_BLOCK_SIZE
) -> PageGeometry:
    """The geometry of one policy by name; `ConfigError` lists the names.

    `min_block_size` is kvtide's alone: the baselines give every group the same block.
    """
    if policy not in POLICIES:
        raise ConfigError(f"policy {policy!r} is not known; allowed: {', '.join(POLICIES)}")
    if policy == "kvtide":
        return solve_geometry(layout, block_size, min_block_size=min_block_size)
    return POLICIES[policy](layout, block_size)
