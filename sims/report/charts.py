"""The charts of a report as Vega-Lite specifications, each with a title, a sentence for screen readers, and its table.

Colours are names of CSS variables (`var(--c1)`), which the page replaces by the light or the dark theme's values when
it draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 2**30
# Bottom to top of the stack, with the colours' numbers: what is needed, what is wasted, what is left.
CAUSES = {
    "needed": 1,
    "out_of_window": 2,
    "in_flight_reserve": 3,
    "draft_reserve": 4,
    "block_tail": 5,
    "group_padding": 6,
    "page_padding": 7,
    "idle_cached": 8,
    "free": 9,
}
TIER_COLOURS = (1, 3, 5, 4)

Spec = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """One figure of the page: the specification, and the same numbers as a table."""

    name: str
    title: str
    description: str
    spec: Spec
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def memory_chart(series: Sequence[Mapping[str, Any]]) -> Chart:
    """Bytes of all pools by cause over time, stacked up to the size of the pools."""
    sampled = [point for point in series if point["memory"]]
    causes = [cause for cause in CAUSES if any(point["memory"][cause] for point in sampled)]
    values = [
        {"t": point["time_s"], "cause": _words(cause), "order": order, "gib": point["memory"][cause] / GIB}
        for point in sampled
        for order, cause in enumerate(causes)
    ]
    spec = _over_time(
        {"type": "area", "interpolate": "step-after"},
        values,
        y={"field": "gib", "type": "quantitative", "stack": "zero", "title": "KV memory (GiB)"},
        colour=_colours("cause", {_words(cause): CAUSES[cause] for cause in causes}),
        order={"field": "order", "type": "quantitative"},
        tooltip=[_shown("t", "time (s)", ",.1f"), _shown("cause", "cause"), _shown("gib", "GiB", ",.3f")],
    )
    return Chart(
        "memory",
        "KV memory by cause",
        "Stacked areas of the KV pool's bytes by cause over virtual time; they add up to the pool.",
        spec,
        ("time (s)", *(f"{_words(cause)} (GiB)" for cause in causes)),
        [(point["time_s"], *(point["memory"][cause] / GIB for cause in causes)) for point in sampled],
    )


def requests_chart(series: Sequence[Mapping[str, Any]]) -> Chart:
    """Requests running and waiting over time."""
    return _lines(
        series,
        "requests",
        "Requests running and waiting",
        "Lines of requests running and waiting, means of each interval, over virtual time.",
        "requests",
        {"running": ("running", 1), "waiting": ("waiting", 2)},
    )


def batch_chart(series: Sequence[Mapping[str, Any]]) -> Chart:
    """Tokens per step, of prompts and of decode, over time."""
    return _lines(
        series,
        "batch",
        "Tokens per step",
        "Lines of the tokens that one step computes, of prompts and of decode, means of each interval.",
        "tokens per step",
        {"prompts": ("prefill_tokens_per_step", 3), "decode": ("decode_tokens_per_step", 1)},
    )


def hits_chart(series: Sequence[Mapping[str, Any]]) -> Chart:
    """Hit rate by tier over time, stacked."""
    points = [point for point in series if point["hit_rate_by_tier"] is not None]
    tiers = list(points[0]["hit_rate_by_tier"]) if points else ["device"]
    width = series[0]["duration_s"] if series else 1.0
    values = [
        {
            "t": point["time_s"],
            "until": point["time_s"] + width,
            "tier": tier,
            "order": order,
            "rate": point["hit_rate_by_tier"][tier],
        }
        for point in points
        for order, tier in enumerate(tiers)
    ]
    spec = _over_time(
        # Bars and not an area: between intervals that admit nobody there is no rate to draw a line to.
        {"type": "rect"},
        values,
        y={
            "field": "low",
            "type": "quantitative",
            "title": "prompt tokens hit",
            "axis": {"format": ".0%"},
            "scale": {"domain": [0, 1]},
        },
        colour=_colours("tier", {tier: TIER_COLOURS[i % len(TIER_COLOURS)] for i, tier in enumerate(tiers)}),
        tooltip=[_shown("t", "time (s)", ",.1f"), _shown("tier", "tier"), _shown("rate", "hit rate", ".1%")],
    )
    spec["transform"] = [
        {"stack": "rate", "groupby": ["t"], "sort": [{"field": "order"}], "as": ["low", "high"], "offset": "zero"}
    ]
    spec["encoding"]["x2"] = {"field": "until"}
    spec["encoding"]["y2"] = {"field": "high"}
    return Chart(
        "hits",
        "Hit rate by tier",
        "Stacked bars of the share of prompt tokens found in each tier, over virtual time.",
        spec,
        ("time (s)", *tiers),
        [(point["time_s"], *(f"{point['hit_rate_by_tier'][tier]:.1%}" for tier in tiers)) for point in points],
    )


def distribution_chart(name: str, title: str, histogram: Mapping[str, Any], spread: Mapping[str, float]) -> Chart:
    """A histogram over a logarithmic axis in milliseconds, with its percentiles."""
    edges = [1e3 * edge for edge in histogram["edges"]]
    bins = list(zip(edges, edges[1:], histogram["counts"], strict=False))
    marks = [{"at": 1e3 * spread[key], "percentile": key, "row": row} for row, key in enumerate(("p50", "p90", "p99"))]
    # A domain of its own, since the axis of a layer would begin at a round power of ten.
    scale = {"type": "log", "domain": [edges[0], edges[-1]], "nice": False} if edges else {}
    spec: Spec = {
        "height": 200,
        "layer": [
            {
                "data": {"values": [{"from": low, "to": high, "count": count} for low, high, count in bins]},
                "mark": {"type": "rect", "color": "var(--c1)", "stroke": "var(--surface)", "strokeWidth": 1},
                "encoding": {
                    "x": {
                        "field": "from",
                        "type": "quantitative",
                        "title": f"{title} (ms, logarithmic)",
                        "scale": scale,
                        "axis": {"format": "~s" if edges and edges[-1] >= 1e4 else "~g", "tickCount": 6},
                    },
                    "x2": {"field": "to"},
                    "y": {
                        "field": "count",
                        "type": "quantitative",
                        "title": "requests",
                        "axis": {"format": "~s", "tickCount": 5},
                        # Room above the bars for the percentiles' names.
                        "scale": {"domain": [0, 1.3 * max(histogram["counts"], default=1)], "nice": False},
                    },
                    "y2": {"datum": 0},
                    "tooltip": [
                        _shown("from", "from (ms)", ",.3~f"),
                        _shown("to", "to (ms)", ",.3~f"),
                        _shown("count", "requests", ",d"),
                    ],
                },
            },
            {
                "data": {"values": marks},
                "mark": {"type": "rule", "color": "var(--text)", "strokeDash": [4, 3]},
                "encoding": {
                    "x": {"field": "at", "type": "quantitative"},
                    "tooltip": [_shown("percentile", "percentile"), _shown("at", "ms", ",.3~f")],
                },
            },
            {
                "data": {"values": marks},
                "mark": {
                    "type": "text",
                    "color": "var(--text)",
                    "align": "right",
                    "dx": -3,
                    "baseline": "top",
                    "fontSize": 11,
                },
                "encoding": {
                    "x": {"field": "at", "type": "quantitative"},
                    # One below the other: percentiles can lie close together.
                    "y": {
                        "field": "row",
                        "type": "quantitative",
                        "axis": None,
                        "scale": {"domain": [0, 14], "range": [6, 206]},
                    },
                    "text": {"field": "percentile"},
                },
            },
        ],
    }
    spec["resolve"] = {"scale": {"y": "independent"}}
    return Chart(
        name,
        title,
        f"Histogram of {title.lower()} of all requests; dashed lines mark p50, p90 and p99.",
        spec,
        ("from (ms)", "to (ms)", "requests"),
        list(bins),
    )


# Figures by which runs are compared: the key, its words, its format, and whether more is better.
COMPARED = (
    ("output_tokens_per_s", "output tokens/s", ",.0f"),
    ("ttft_p50_s", "TTFT p50 (s)", ",.3f"),
    ("ttft_p99_s", "TTFT p99 (s)", ",.3f"),
    ("tpot_mean_s", "TPOT mean (s)", ",.4f"),
    ("hit_rate", "prompt tokens hit", ".1%"),
    ("kv_waste", "held KV not needed", ".2%"),
    ("preemptions", "preemptions", ",d"),
    ("peak_running", "running at the peak", ",d"),
)


def comparison_charts(rows: Sequence[Mapping[str, Any]], label: str) -> list[Chart]:
    """One bar chart per figure; `label` is the key that names a row."""
    charts = []
    for key, words, shown in COMPARED[:6]:
        values = [{"name": str(row[label]), "value": row[key]} for row in rows]
        spec: Spec = {
            "height": 26 * len(rows) + 10,
            "data": {"values": values},
            "encoding": {
                "y": {"field": "name", "type": "nominal", "title": None, "sort": None},
                "x": {
                    "field": "value",
                    "type": "quantitative",
                    "title": words,
                    "axis": {"format": _axis(shown), "tickCount": 4},
                },
                "tooltip": [_shown("name", label), _shown("value", words, shown)],
            },
            "mark": {"type": "bar", "color": "var(--c1)"},
        }
        charts.append(
            Chart(f"compare-{key}", words, f"Bars of {words} by {label}.", spec, (label, words), _pairs(values))
        )
    return charts


def sweep_charts(rows: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> list[Chart]:
    """One chart per figure over the first axis of a sweep, a line for every combination of the others."""
    first, others = axes[0], axes[1:]
    numbers = all(_is_number(row[first]) for row in rows)
    names = list(dict.fromkeys(_combination(row, others) for row in rows))
    charts = []
    for key, words, shown in COMPARED:
        values = [
            {
                "x": float(row[first]) if numbers else str(row[first]),
                "series": _combination(row, others),
                "value": row[key],
            }
            for row in rows
        ]
        spec: Spec = {
            "height": 200,
            "data": {"values": values},
            "mark": {"type": "line", "point": {"size": 45}, "strokeWidth": 2},
            "encoding": {
                "x": {
                    "field": "x",
                    "type": "quantitative" if numbers else "nominal",
                    "title": first,
                    "sort": None,
                    "axis": {"format": "~s", "tickCount": 6} if numbers else {"labelAngle": 0},
                },
                "y": {
                    "field": "value",
                    "type": "quantitative",
                    "title": words,
                    "axis": {"format": _axis(shown)},
                },
                "tooltip": [
                    _shown("x", first),
                    _shown("series", ", ".join(others) or "run"),
                    _shown("value", words, shown),
                ],
            },
        }
        if others:
            colours = {name: 1 + number % 8 for number, name in enumerate(names)}
            spec["encoding"]["color"] = _colours("series", colours)
            if len(names) > 8:
                del spec["encoding"]["color"]
                spec["encoding"]["detail"] = {"field": "series"}
        else:
            spec["mark"]["color"] = "var(--c1)"
            spec["mark"]["point"]["color"] = "var(--c1)"
        table = [(value["x"], value["series"], value["value"]) for value in values]
        description = f"{words} over {first}" + (f", a line per {', '.join(others)}." if others else ".")
        charts.append(
            Chart(f"sweep-{key}", words, description, spec, (first, ", ".join(others) or "run", words), table)
        )
    return charts


def _axis(shown: str) -> str:
    """The format of an axis for figures of this format: no more digits than its ticks need, no milli in seconds."""
    return "~%" if "%" in shown else "~s" if shown in (",.0f", ",d") else "~g"


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, bool)


def _combination(row: Mapping[str, Any], axes: Sequence[str]) -> str:
    return ", ".join(str(row[axis]) for axis in axes) or "all"


def _lines(
    series: Sequence[Mapping[str, Any]],
    name: str,
    title: str,
    description: str,
    unit: str,
    parts: Mapping[str, tuple[str, int]],
) -> Chart:
    values = [
        {"t": point["time_s"], "what": what, "value": point[key]}
        for point in series
        for what, (key, _) in parts.items()
    ]
    spec = _over_time(
        {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5},
        values,
        y={"field": "value", "type": "quantitative", "title": unit, "axis": {"format": "~s"}},
        colour=_colours("what", {what: colour for what, (_, colour) in parts.items()}),
        tooltip=[_shown("t", "time (s)", ",.1f"), _shown("what", " "), _shown("value", unit, ",.1f")],
    )
    rows = [(point["time_s"], *(point[key] for key, _ in parts.values())) for point in series]
    return Chart(name, title, description, spec, ("time (s)", *parts), rows)


def _over_time(mark: Spec, values: list[Spec], y: Spec, colour: Spec, tooltip: list[Spec], **channels: Spec) -> Spec:
    times = [value["t"] for value in values]
    return {
        "height": 220,
        "data": {"values": values},
        "mark": mark,
        "encoding": {
            "x": {
                "field": "t",
                "type": "quantitative",
                "title": "virtual time (s)",
                "axis": {"format": "~s", "tickCount": 6},
                "scale": {"domain": [min(times), max(times)], "nice": False} if len(set(times)) > 1 else {},
            },
            "y": y,
            "color": colour,
            "tooltip": tooltip,
            **channels,
        },
    }


def _colours(field: str, numbers: Mapping[str, int]) -> Spec:
    return {
        "field": field,
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(numbers), "range": [f"var(--c{number})" for number in numbers.values()]},
    }


def _shown(field: str, title: str, number: str | None = None) -> Spec:
    kind = {"type": "quantitative", "format": number} if number else {"type": "nominal"}
    return {"field": field, "title": title, **kind}


def _pairs(values: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    return [(value["name"], value["value"]) for value in values]


def _words(cause: str) -> str:
    return cause.replace("_", " ")
