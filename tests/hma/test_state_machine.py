"""Random traffic on random models: the manager against the oracle after every operation.

The `ci` profile is bounded. `KVTIDE_HYPOTHESIS=long` runs until `KVTIDE_MACHINE_OPERATIONS` (one million) operations
have been compared, with fresh random cases, and prints how many there were.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import QUIET, ManagerMachine

from kvtide.hma import hashing, prefix_index, sequences, waiting

IS_LONG = (os.environ.get("KVTIDE_HYPOTHESIS") or os.environ.get("HYPOTHESIS_PROFILE")) == "long"
TARGET = int(os.environ.get("KVTIDE_MACHINE_OPERATIONS", "1000000" if IS_LONG else "0"))


@pytest.mark.parametrize("small", [False, True])
def test_manager_equals_the_oracle(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with limits so low that a few blocks are looked up by span, and are as many as may wait."""
    if small:
        monkeypatch.setattr(hashing, "SPAN", 2)
        monkeypatch.setattr(prefix_index, "SPAN", 2)
        monkeypatch.setattr(sequences, "HASH_AHEAD", 6)
        monkeypatch.setattr(waiting, "MOST_WAITING", 3)

    class Machine(ManagerMachine):
        operations = 0
        counts = dict.fromkeys(ManagerMachine.counts, 0)

    examples, steps = (300, 100) if IS_LONG else (150, 40)
    while True:
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=QUIET,
                derandomize=not IS_LONG, phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
            ),
        )  # fmt: skip
        print(f"{Machine.operations} operations compared: {Machine.counts}", flush=True)
        if Machine.operations >= TARGET:
            break
    assert Machine.operations > 1_000
    assert Machine.counts["hits"] > 20
    assert Machine.counts["exhausted"] > 20
    assert Machine.counts["loads"] > 20
