"""A report as one HTML page that needs no network: charts drawn by an inlined Vega-Lite, tables beside each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from kvtide.kvcache import MissingExtra

from . import charts
from .charts import Chart

EXTRA = "report"
# Vega and Vega-Lite, without what the page does not use.
SNIPPET = "window.drawChart = (element, spec, options) => vegaEmbed(element, spec, options);"


def run_page(report: Mapping[str, Any], *, made: str = "") -> str:
    """The page of one run; `report` is what `kvtide simulate --json` prints, `made` says when or from what."""
    devices = report["tensor_parallel_size"] * report["data_parallel_size"] * report.get("pipeline_parallel_size", 1)
    series, spread = report["series"], {key: report[key] for key in ("ttft_s", "tpot_s")}
    over_time = [charts.memory_chart(series), charts.requests_chart(series), charts.batch_chart(series)]
    if any(point["hit_rate_by_tier"] for point in series):
        over_time.append(charts.hits_chart(series))
    latency = [
        charts.distribution_chart("ttft", "Time to first token", report["distributions"]["ttft_s"], spread["ttft_s"]),
        charts.distribution_chart("tpot", "Time per output token", report["distributions"]["tpot_s"], spread["tpot_s"]),
    ]
    rows = report.get("comparison") or []
    comparison = charts.comparison_charts(rows, "policy") if len(rows) > 1 else []
    return _render(
        "run.html.j2",
        [*over_time, *latency, *comparison],
        made=made,
        title=f"{report['model']} on {devices} × {report['gpu']}",
        subtitle=f"{report['trace']}: {report['requests']:,} requests, memory policy {report['policy']}",
        tiles=_tiles(report),
        notes=report["notes"],
        over_time=over_time,
        latency=latency,
        spread_columns=("milliseconds", "mean", "p50", "p90", "p99"),
        spread_rows=[
            (name, *(1e3 * spread[key][part] for part in ("mean", "p50", "p90", "p99")))
            for name, key in (("time to first token", "ttft_s"), ("time per output token", "tpot_s"))
        ],
        comparison=comparison,
        comparison_columns=("policy", *(words for _, words, _ in charts.COMPARED)),
        comparison_rows=[(row["policy"], *_formatted(row)) for row in rows],
        knobs=_knobs(report),
    )


def sweep_page(
    rows: Sequence[Mapping[str, Any]], axes: Sequence[str], knobs: Mapping[str, Any], *, made: str = ""
) -> str:
    """The page of a sweep. `rows` have the axes' values and `error` (None for a point that ran), and its figures."""
    ran = [row for row in rows if row["error"] is None]
    figures = charts.sweep_charts(ran, axes) if ran else []
    return _render(
        "sweep.html.j2",
        figures,
        made=made,
        title=f"Sweep over {', '.join(axes)}",
        subtitle=f"{len(rows):,} points, {len(rows) - len(ran):,} without a result",
        axes=axes,
        figures=figures,
        columns=(*axes, *(words for _, words, _ in charts.COMPARED)),
        rows=[(*(row[axis] for axis in axes), *_formatted(row)) for row in ran],
        failed_columns=(*axes, "error"),
        failed=[(*(row[axis] for axis in axes), row["error"]) for row in rows if row["error"] is not None],
        knobs=list(knobs.items()),
    )


def check_packages() -> None:
    """`MissingExtra` when a package that a page is made with is not installed."""
    for package in ("jinja2", "vl_convert"):
        if find_spec(package) is None:
            raise MissingExtra("an HTML report", package.replace("vl_convert", "vl-convert-python"), EXTRA)


def _render(template: str, drawn: Sequence[Chart], **values: Any) -> str:
    check_packages()
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("kvtide.sims.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["shown"] = _shown
    specs = [{"name": chart.name, "spec": {**chart.spec, "description": chart.description}} for chart in drawn]
    return environment.get_template(template).render(
        bundle=_bundle(), charts=specs, version=metadata.version("kvtide"), **values
    )


@cache
def _bundle() -> str:
    import vl_convert

    script: str = vl_convert.javascript_bundle(SNIPPET)
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _tiles(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("makespan", f"{report['makespan_s']:,.1f} s"),
        ("output tokens/s", f"{report['output_tokens_per_s']:,.0f}"),
        ("TTFT p50 / p99", f"{report['ttft_s']['p50']:,.2f} / {report['ttft_s']['p99']:,.2f} s"),
        ("TPOT mean", f"{1e3 * report['tpot_s']['mean']:,.1f} ms"),
        ("prompt tokens hit", f"{report['hit_rate']:.1%}"),
        ("preemptions", f"{report['preemptions']:,}"),
        ("device busy", f"{report['device_busy']:.0%}"),
        ("refused as too long", f"{report['refused']:,}"),
    ]


def _knobs(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    knobs = {
        **report["flags"],
        **report["settings"],
        **{f"efficiency {name}": value for name, value in report["efficiency"].items()},
        "weights per rank (GiB)": report["weight_bytes_per_rank"] / charts.GIB,
        "KV pool per rank (GiB)": report["pool_bytes_per_rank"] / charts.GIB,
    }
    return [(name.replace("_", " "), _shown(value)) for name, value in knobs.items() if value not in (None, (), [], "")]


def _formatted(row: Mapping[str, Any]) -> list[str]:
    return [format(row[key], "," if shown == ",d" else shown) for key, _, shown in charts.COMPARED]


def _shown(value: Any) -> str:
    """A cell for people: five significant digits of what is not whole."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return "–" if value is None else str(value)
    if not value or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 4 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(digits, 9)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
