"""What the memory manager answers: an admission, and the reservation of a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache.specs import Int64Array


class Admission(NamedTuple):
    """A request has a row. Its first `num_cached_tokens` tokens are there already.

    `limited_by` names the groups that could not serve a longer hit.
    """

    row: int
    num_cached_tokens: int
    limited_by: tuple[str, ...]


class Copy(NamedTuple):
    """Blocks to copy before the step runs, table by table: unit indices of a group's blocks."""

    group: str
    source: npt.NDArray[np.int32]
    destination: npt.NDArray[np.int32]


class Reservation(NamedTuple):
    """One step. Row `rows[i]` computes tokens `[start[i], start[i] + num_tokens[i])`.

    `changed` names, per group, the rows of its table that differ from the last step's.
    """

    step: int
    rows: Int64Array
    start: Int64Array
    num_tokens: Int64Array
    changed: dict[str, Int64Array]
    copies: list[Copy]
