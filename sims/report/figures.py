"""What a report says of a run besides its summary: how things went over time, distributions, policies side by side.

Everything here is plain JSON, so that a page can be made from a saved report too. Times are seconds of virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..serving.engine import Run
from ..serving.recording import Interval, Recording

BINS = 40


def series_of(recording: Recording, run: Run) -> list[dict[str, Any]]:
    """One object per interval: means over its steps, tokens per step, hit rate by tier, memory by cause.

    Where a step outlasts an interval, so that none begins in it, what was so before goes on.
    Hit rates are shares of the prompt tokens admitted in the interval; None where none were. A lower tier's share of
    what was loaded follows the tiers' own counts between one interval and the next.
    """
    tiers = [tier.name for tier in run.offload[0].tiers] if run.offload else []
    end = tuple(map(sum, zip(*(rank.tier_tokens for rank in run.offload), strict=True)))
    series = recording.series()
    after = [*(interval.tier_tokens for _, interval in series[1:]), end]
    means = _means([interval for _, interval in series])
    return [
        {
            "time_s": time_s,
            "duration_s": recording.interval_s,
            "steps": interval.steps,
            "device_busy": min(interval.busy_s / recording.interval_s, 1.0),
            **mean,
            "admitted": interval.admitted,
            "finished": interval.finished,
            "preemptions": interval.preemptions,
            "hit_rate_by_tier": _hit_rates(interval, tiers, following),
            "memory": interval.memory._asdict() if interval.memory else None,
        }
        for (time_s, interval), following, mean in zip(series, after, means, strict=True)
    ]


def _means(intervals: Sequence[Interval]) -> list[dict[str, float]]:
    nothing = dict.fromkeys(("running", "waiting", "prefill_tokens_per_step", "decode_tokens_per_step"), 0.0)
    means, last = [], nothing
    for interval in intervals:
        if interval.steps:
            sums = (interval.running, interval.waiting, interval.prefill_tokens, interval.decode_tokens)
            last = {name: value / interval.steps for name, value in zip(nothing, sums, strict=True)}
        elif interval.is_idle:
            last = nothing
        means.append(last)
        if interval.is_idle:
            last = nothing
    return means


def _hit_rates(interval: Interval, tiers: Sequence[str], following: Sequence[float]) -> dict[str, float] | None:
    if not interval.prompt_tokens:
        return None
    rates = {"device": interval.device_hit_tokens / interval.prompt_tokens}
    before = interval.tier_tokens or (0.0,) * len(tiers)
    moved = [max(b - a, 0.0) for a, b in zip(before, following, strict=False)]
    # Tiers count loads that were started; when none was in this interval, the nearest tier is as good a guess as any.
    shares = [part / sum(moved) for part in moved] if sum(moved) else [1.0] + [0.0] * (len(tiers) - 1)
    for tier, share in zip(tiers, shares, strict=False):
        rates[tier] = interval.loaded_tokens / interval.prompt_tokens * share
    return rates


def distributions_of(run: Run) -> dict[str, dict[str, list[float]]]:
    """Histograms of TTFT and TPOT over bins of equal ratio: `edges` in seconds (one more than `counts`)."""
    tpot = [value for item in run.served if (value := item.tpot_s) is not None]
    return {"ttft_s": histogram([item.ttft_s for item in run.served]), "tpot_s": histogram(tpot)}


def histogram(values: Sequence[float]) -> dict[str, list[float]]:
    """Counts of positive values in bins of equal ratio that span all of them."""
    array = np.maximum(np.asarray(values, dtype=np.float64), 1e-9)
    if not len(array):
        return {"edges": [], "counts": []}
    low, high = float(array.min()), float(array.max())
    if high <= low * 1.0001:
        low, high = low / 1.05, high * 1.05
    edges = np.geomspace(low, high, BINS + 1)
    edges[0], edges[-1] = low, high  # a rounded end would lose the extremes
    counts, _ = np.histogram(array, edges)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def compared(report: Mapping[str, Any]) -> dict[str, Any]:
    """The figures by which policies, or points of a sweep, are compared; all of one report."""
    timeline = report["timeline"]
    pool = report["pool_bytes_per_rank"] * report["data_parallel_size"]
    held = [pool - sample["memory"]["free"] - sample["memory"]["idle_cached"] for sample in timeline]
    needed = sum(sample["memory"]["needed"] for sample in timeline)
    return {
        "makespan_s": report["makespan_s"],
        "output_tokens_per_s": report["output_tokens_per_s"],
        "ttft_mean_s": report["ttft_s"]["mean"],
        "ttft_p50_s": report["ttft_s"]["p50"],
        "ttft_p99_s": report["ttft_s"]["p99"],
        "tpot_mean_s": report["tpot_s"]["mean"],
        "tpot_p99_s": report["tpot_s"]["p99"],
        "hit_rate": report["hit_rate"],
        "preemptions": report["preemptions"],
        "peak_running": max(sample["running"] for sample in timeline),
        "kv_waste": 1 - needed / sum(held) if sum(held) else 0.0,
        "device_busy": report["device_busy"],
    }


def row_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """One flat row of a report's figures, for a table of many runs: those compared, and what explains them."""
    timeline = report["timeline"]
    pool = report["pool_bytes_per_rank"] * report["data_parallel_size"]
    offload = report["offload"] or {}
    drafts = report["drafts"]
    return {
        **compared(report),
        "ttft_p90_s": report["ttft_s"]["p90"],
        "tpot_p50_s": report["tpot_s"]["p50"],
        "tpot_p90_s": report["tpot_s"]["p90"],
        "total_tokens_per_s": report["total_tokens_per_s"],
        "requests": report["requests"],
        "refused": report["refused"],
        "prompt_tokens": report["prompt_tokens"],
        "output_tokens": report["output_tokens"],
        "computed_tokens": report["computed_tokens"],
        "steps": report["steps"],
        "max_num_seqs": report["settings"]["max_num_seqs"],
        "max_num_batched_tokens": report["settings"]["max_num_batched_tokens"],
        "pool_bytes_per_rank": report["pool_bytes_per_rank"],
        "weight_bytes_per_rank": report["weight_bytes_per_rank"],
        "acceptance_rate": drafts["acceptance_rate"] if drafts["num_drafts"] else None,
        "mean_acceptance_length": drafts["mean_acceptance_length"] if drafts["num_drafts"] else None,
        "break_even_length": drafts["break_even_length"],
        **{f"hit_rate_{tier}": rate for tier, rate in offload.get("hit_rate_by_tier", {}).items()},
        **{
            f"mean_{cause}": sum(sample["memory"][cause] for sample in timeline) / len(timeline) / pool
            for cause in timeline[0]["memory"]
        },
        "wall_s": report["simulator"]["wall_s"],
    }
