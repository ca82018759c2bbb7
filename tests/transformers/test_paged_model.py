"""One step of any rows through `PagedModel`: decode steps, chunks and new rows together, against whole sequences."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

import torch
from tiny_models import FAMILIES, ragged, tiny_model

from kvtide.connectors.transformers import PagedModel, model_layout
from kvtide.hma import HybridMemoryManager
from kvtide.kvcache import ConfigError
from kvtide.kvcache.arena import Arena
from kvtide.kvcache.solver import solve_geometry

TOKENS = ragged(1, [80])["input_ids"][0].tolist()
OTHERS = ragged(2, [80])["input_ids"][0].tolist()


class Steps:
    """Two sequences, `OTHERS` and `TOKENS`, computed by steps of any sizes."""

    def __init__(self, family: str) -> None:
        model = tiny_model(family)
        with torch.no_grad():
            self.right = [model(torch.tensor([tokens])).logits[0] for tokens in (TOKENS, OTHERS)]
        geometry = solve_geometry(model_layout(model))
        self.manager = HybridMemoryManager(geometry, "4MiB", max_requests=4, max_model_len=256)
        arena = Arena(geometry, self.manager.pool.num_pages)
        arena.memory.fill_(0xFF)
        self.paged = PagedModel(model, self.manager, arena)
        self.rows: dict[int, int] = {}

    def step(self, *counts: int, logits_at: list[int] | None = None) -> Any:
        """`counts[i]` more tokens of sequence i; checks the logits, which are of each row's last token if not said."""
        plans = [(which, count) for which, count in enumerate(counts) if count]
        for which, _ in plans:
            if which not in self.rows:
                self.rows[which] = self.manager.admit(f"{which}", (TOKENS, OTHERS)[which]).row
        rows = [self.rows[which] for which, _ in plans]
        plan = self.manager.reserve(rows, [count for _, count in plans])
        ids: list[int] = []
        right = []
        for (which, count), start in zip(plans, plan.start.tolist(), strict=True):
            ids += (TOKENS, OTHERS)[which][start : start + count]
            right.append(self.right[which][start : start + count])
        wanted = torch.cat([part[-1:] for part in right]) if logits_at is None else torch.cat(right)[logits_at]
        assert (self.paged.run(plan, ids, logits_at) - wanted).abs().max() < 1e-4
        self.manager.commit(rows, [count for _, count in plans])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_any_lengths_share_a_step(family: str) -> None:
    steps = Steps(family)
    steps.step(30)
    steps.step(1, 1)  # a row that goes on, and a new one of equally many tokens
    steps.step(1, 40)
    steps.step(5, 3)
    steps.step(7, 7, logits_at=[0, 3, 6, 8, 13])
    steps.step(20, 2, logits_at=[21])
    steps.step(0, 1)
    steps.paged.close()


def test_tokens_that_are_not_the_reservations() -> None:
    steps = Steps("llama")
    row = steps.manager.admit("one", TOKENS).row
    plan = steps.manager.reserve([row], [10])
    with pytest.raises(ConfigError, match=r"token_ids has the shape \[9\]; the reservation has 10 tokens"):
        steps.paged.run(plan, TOKENS[:9])
