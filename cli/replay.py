"""What `kvtide waste --replay` prints: memory held over time under each policy, by cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvtide.kvcache.geometry import PageGeometry
from kvtide.kvcache.layout import ModelLayout
from kvtide.sims.replay import ReplayWaste, held_bytes, replay
from kvtide.sims.traces import Request
from kvtide.sims.waste import waste_fraction

from .options import console, human_bytes


def run_replays(
    plans: Sequence[PageGeometry],
    requests: Sequence[Request],
    *,
    concurrency: int,
    step_tokens: int,
    kv_from_activations: bool,
) -> list[ReplayWaste]:
    """Replay the trace under every policy; draws a bar on stderr meanwhile, if that is a terminal."""
    err = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        results = []
        for plan in plans:
            task = progress.add_task(f"replaying {plan.policy}", total=len(requests))
            results.append(
                replay(
                    plan,
                    requests,
                    concurrency=concurrency,
                    step_tokens=step_tokens,
                    kv_from_activations=kv_from_activations,
                    on_request=lambda task=task: progress.advance(task),  # type: ignore[misc]
                )
            )
    return results


def replayable(layout: ModelLayout, plans: Sequence[PageGeometry]) -> tuple[list[PageGeometry], list[str]]:
    """The plans that a replay can follow for this model, and notes on what it leaves out."""
    notes = []
    kept = list(plans)
    if layout.has_cross_attention and len(plans) > 1:
        kept = [plan for plan in plans if not any(fmt.keeps_all for fmt in plan.formats)]
        if len(kept) < len(plans):
            notes.append("uniform is left out: a replay cannot keep images in the layers that have none")
    if layout.state_bytes:
        notes.append(
            "no prefix is hit: a recurrent state can be taken up only at a checkpoint, and a replay makes none"
        )
    return kept, notes


def report_json(
    layout: ModelLayout, workload: str, concurrency: int, results: Sequence[ReplayWaste], notes: Sequence[str]
) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "model": layout.name,
        "trace": workload,
        "requests": results[0].requests,
        "total_tokens": results[0].total_tokens,
        "accounting": "time-integrated",
        "concurrency": concurrency,
        "policies": {result.policy: _policy_json(result) for result in results},
        "notes": list(notes),
    }


def _policy_json(result: ReplayWaste) -> dict[str, Any]:
    """One policy's figures, with the keys of the final-length report and those that only a replay has."""
    return {
        **_figures(result.mean_bytes),
        "by_cause": {cause: value for cause, value in result.mean_bytes.items() if cause != "idle_cached"},
        "by_kind": {kind: _figures(by_cause) for kind, by_cause in result.by_kind.items()},
        "idle_cached_bytes": result.mean_bytes["idle_cached"],
        "hit_rate": result.hit_rate,
        "steps": result.steps,
    }


def _figures(by_cause: dict[str, float]) -> dict[str, float]:
    held = held_bytes(by_cause)
    return {
        "allocated_bytes": held,
        "needed_bytes": by_cause["needed"],
        "waste_fraction": waste_fraction(by_cause["needed"], held),
    }


def print_replay(
    layout: ModelLayout, workload: str, concurrency: int, results: Sequence[ReplayWaste], notes: Sequence[str]
) -> None:
    """The table for people."""
    causes = [
        cause
        for cause in results[0].mean_bytes
        if cause not in ("needed", "idle_cached") and any(result.mean_bytes[cause] for result in results)
    ]
    table = Table(
        title=f"KV memory of {layout.name} replaying {workload}, {concurrency} requests at a time: means over time",
        title_justify="left",
    )
    for heading in (
        "policy",
        "held",
        "needed",
        "waste",
        *(cause.replace("_", " ") for cause in causes),
        "idle cached",
        "hit rate",
    ):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for result in results:
        table.add_row(
            result.policy,
            human_bytes(result.held_bytes),
            human_bytes(result.mean_bytes["needed"]),
            f"{result.waste_fraction:.2%}",
            *(_share(result.mean_bytes[cause], result.held_bytes) for cause in causes),
            human_bytes(result.mean_bytes["idle_cached"]),
            f"{result.hit_rate:.1%}",
        )
    out = console()
    out.print(table)
    explained = (
        "idle cached: prefixes that no request holds, in pages that one holds a block of; only the page's own group"
    )
    for note in (f"{explained} can take them at once, and they count neither as held nor as waste", *notes):
        out.print(f"note: {note}", style="dim")


def _share(part: float, whole: float) -> str:
    return "–" if not part else f"{part / whole:.2%}"
