"""`kvtide simulate`: serve a trace in virtual time and say what the engine's flags do to memory and latency."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvtide.kvcache import ConfigError, KvtideError
from kvtide.kvcache.policies import POLICIES
from kvtide.sims.report.charts import COMPARED
from kvtide.sims.report.figures import compared, distributions_of, series_of
from kvtide.sims.report.story import as_json
from kvtide.sims.serving.advice import advise
from kvtide.sims.serving.build import GPU_MEMORY_UTILIZATION, Deployment
from kvtide.sims.serving.calibrate import measure_run
from kvtide.sims.serving.cost import Parallel
from kvtide.sims.serving.defaults import CONTEXTS, MODES
from kvtide.sims.serving.engine import Run
from kvtide.sims.serving.gpus import gpu_of
from kvtide.sims.serving.kernel_curves import read_kernel_curves
from kvtide.sims.serving.measures import Measures, Spread
from kvtide.sims.serving.recording import Recording
from kvtide.sims.serving.settings import DEFAULT_VERSION, RULES
from kvtide.sims.serving.settings import POLICIES as SCHEDULING
from kvtide.sims.serving.speculation import Acceptance, SpeculativeConfig, read_speculative_config
from kvtide.sims.traces import FORMATS, Request, open_trace

from .deployment import load_efficiency, load_work
from .offloading import offload_of, offload_options
from .options import console, human_bytes, load_layout, parse_size
from .reporting import (
    STDOUT,
    check_followed,
    check_outputs,
    print_stories,
    report_options,
    write_json,
    write_whole,
)


def _optional_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    return None if value is None else parse_size(ctx, param, value)


@click.command("simulate")
@click.option("--model", required=True, help="The model's config.json, or a bundled name together with --params.")
@click.option("--params", type=float, help="Parameters in billions, where the model is only known by its layout.")
@click.option("--active-params", type=float, help="With --params: billions of parameters that a token goes through.")
@click.option(
    "--bytes-per-param",
    type=float,
    help="With --params: bytes of a weight, such as 1 for FP8 and 0.53 for MXFP4; 2 by default. A config.json says it.",
)
@click.option("--trace", required=True, help="A trace file or folder, or `demo`.")
@click.option("--trace-format", type=click.Choice(list(FORMATS)), help="Format of the trace.")
@click.option("--num-requests", type=int, help="Stop after this many requests.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of all random draws.")
@click.option("--gpu", required=True, metavar="NAME[:N]", help="Device and how many of it, e.g. h200:4.")
@click.option("--tp", type=click.IntRange(1, 1024), help="Tensor-parallel size; by default all devices.")
@click.option("--data-parallel-size", type=click.IntRange(1, 1024), default=1, help="Ranks that share out experts.")
@click.option("--pipeline-parallel-size", type=click.IntRange(1, 1024), default=1, help="Stages of layers.")
@click.option("--kv-dtype", "--kv-cache-dtype", default="auto", show_default=True, help="KV cache dtype.")
@click.option("--policy", type=click.Choice(list(POLICIES)), default="kvtide", show_default=True, help="Page geometry.")
@click.option("--block-size", default=16, show_default=True, help="Tokens per block.")
@click.option("--max-model-len", type=int, help="Longest sequence; by default the model's.")
@click.option("--max-num-seqs", type=int, help="Running requests; by default vLLM's for the device.")
@click.option("--max-num-batched-tokens", type=int, help="Tokens per step; by default vLLM's for the device.")
@click.option(
    "--gpu-memory-utilization",
    default=GPU_MEMORY_UTILIZATION,
    show_default=True,
    help="Share of the device's memory that the engine takes.",
)
@click.option("--kv-cache-memory-bytes", callback=_optional_size, help="KV memory of one rank instead, e.g. 20GiB.")
@click.option(
    "--performance-mode",
    type=click.Choice(MODES),
    default="balanced",
    show_default=True,
    help="As vLLM's; it changes defaults.",
)
@click.option(
    "--usage-context",
    type=click.Choice(CONTEXTS),
    default="api-server",
    show_default=True,
    help="Server or offline; it changes defaults.",
)
@click.option(
    "--vllm-version",
    "version",
    type=click.Choice(list(RULES)),
    default=DEFAULT_VERSION,
    show_default=True,
    help="Whose rules and defaults hold.",
)
@click.option(
    "--enable-chunked-prefill/--no-enable-chunked-prefill",
    default=True,
    show_default=True,
    help="Split long prompts over steps.",
)
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    default=True,
    show_default=True,
    help="Reuse what earlier prompts left.",
)
@click.option("--long-prefill-token-threshold", default=0, show_default=True, help="Tokens of one request in one step.")
@click.option(
    "--scheduling-policy",
    type=click.Choice(SCHEDULING),
    default="fcfs",
    show_default=True,
    help="Order of waiting requests.",
)
@click.option(
    "--async-scheduling/--no-async-scheduling",
    default=True,
    show_default=True,
    help="Plan a step while the last one runs.",
)
@click.option("--watermark", default=0.0, show_default=True, help="Share of the pool kept free at admission.")
@click.option("--speculative-config", metavar="JSON|FILE", help="As vLLM's.")
@click.option("--acceptance-rate", type=float, help="Probability that a draft is right if those before it were.")
@click.option("--acceptance-rates", metavar="P,P,...", help="Share of drafts accepted at each position.")
@click.option("--acceptance-length", type=float, help="Mean tokens per step of a request with drafts.")
@click.option("--thinking-token-budget", type=int, help="Reasoning tokens per request, where the trace counts them.")
@click.option("--efficiency", type=click.Path(), help="What `kvtide calibrate --json` printed.")
@click.option("--kernel-curves", type=click.Path(), help="MLA decode, measured: benchmarks/gpu_mla.py --json wrote it.")
@offload_options
@report_options
def command(
    explain: tuple[str, ...], compare: tuple[str, ...], json_file: str | None, html_file: Path | None, **options: Any
) -> None:
    """Serve a trace in virtual time: vLLM's scheduling rules over the real memory manager, and a roofline for time.

    \b
    Examples:
      kvtide simulate --model config.json --trace demo --gpu h200:2 --num-requests 500
      kvtide simulate --model gpt-oss-120b --params 117 --active-params 5.1 --bytes-per-param 0.53 \\
        --trace azure.csv --gpu h100:4
      kvtide simulate --model config.json --trace demo --gpu h200 --max-num-seqs 64 --policy grouped --json
      kvtide simulate --model config.json --trace demo --gpu h200 --offload-tier host:256GB:50GB/s:10us
      kvtide simulate --model config.json --trace demo --gpu h200 --html report.html --compare grouped,lcm
      kvtide simulate --model config.json --trace demo --gpu h200 --explain chat-1/0
    """
    check_outputs(json_file, html_file)
    deployment, requests = plan(**options)
    check_followed(explain, requests)
    recording = None
    if explain or json_file or html_file:
        arrivals = [request.arrival_s for request in requests]
        recording = Recording(span_s=max(arrivals) - min(arrivals), follow=explain)
    report = simulate(deployment, requests, options, recording)
    if compare:
        rows, notes = _compare(deployment, requests, options, report, compare)
        report["comparison"] = rows
        report["notes"] = [*report["notes"], *notes]
    stories = recording.stories if recording else []
    report["stories"] = [as_json(story) for story in stories]
    if html_file is not None:
        from kvtide.sims.report.page import run_page

        write_whole(html_file, run_page(report))
    if json_file is not None:
        write_json(report, json_file)
    if json_file == STDOUT:
        return
    if explain:
        print_stories(stories)
    else:
        _print(report)


def simulate(
    deployment: Deployment,
    requests: list[Request],
    options: Mapping[str, Any],
    recording: Recording | None = None,
    *,
    bar: bool = True,
) -> dict[str, Any]:
    """Run the deployment on the requests; the report. `options` are the flags as given, which the report repeats."""
    engine = deployment.engine(options["seed"], recording)
    begin = time.perf_counter()
    run = _run(engine.run, requests, bar)
    report = _report(deployment, run, measure_run(run), time.perf_counter() - begin)
    report["trace"] = options["trace"]
    report["flags"] = {name: value for name, value in options.items() if value not in (None, (), "")}
    report["comparison"] = []
    report["distributions"] = distributions_of(run)
    report["series"] = series_of(recording, run) if recording else []
    return report


def _compare(
    deployment: Deployment,
    requests: list[Request],
    options: Mapping[str, Any],
    report: dict[str, Any],
    policies: tuple[str, ...],
) -> tuple[list[dict[str, Any]], list[str]]:
    """The figures of the run's policy and of others, and a note on each that cannot run."""
    rows = [{"policy": deployment.policy, **compared(report)}]
    notes = []
    for policy in policies:
        if policy == deployment.policy:
            continue
        try:
            other = simulate(replace(deployment, policy=policy), requests, options)
        except KvtideError as error:
            notes.append(f"the policy {policy} cannot run here: {error}")
        else:
            rows.append({"policy": policy, **compared(other)})
    return rows, notes


def plan(
    model: str,
    params: float | None,
    active_params: float | None,
    bytes_per_param: float | None,
    trace: str,
    trace_format: str | None,
    num_requests: int | None,
    seed: int,
    gpu: str,
    tp: int | None,
    data_parallel_size: int,
    pipeline_parallel_size: int,
    kv_dtype: str,
    speculative_config: str | None,
    acceptance_rate: float | None,
    acceptance_rates: str | None,
    acceptance_length: float | None,
    efficiency: str | None,
    kernel_curves: str | None,
    offload_tiers: tuple[str, ...],
    kv_transfer_config: str | None,
    offload_write_policy: str | None,
    offload_windows: str | None,
    offload_rules: tuple[str, ...],
    preemption: str,
    swap_space: str | None,
    **flags: Any,
) -> tuple[Deployment, list[Request]]:
    """What the flags describe: a deployment, and the trace's requests."""
    layout = load_layout(model, kv_dtype, 1, None)
    device, count = gpu_of(gpu)
    others = data_parallel_size * pipeline_parallel_size
    parallel = Parallel(tp or max(count // others, 1), data_parallel_size, pipeline_parallel_size)
    tensor = parallel.tensor
    if ":" in gpu and parallel.devices != count:
        raise ConfigError(
            f"--tp {tensor} times --data-parallel-size {data_parallel_size} times --pipeline-parallel-size "
            f"{pipeline_parallel_size} are not the {count} devices"
        )
    work = load_work(model, layout, params, active_params, bytes_per_param)
    if data_parallel_size > 1 and not work.experts:
        raise ConfigError("data-parallel ranks of a model without experts are engines of their own; simulate one")
    drafter = None
    if speculative_config is not None:
        drafter = read_speculative_config(
            speculative_config, n_predict=len(layout.draft_specs), tensor_parallel_size=tensor
        )
    requests = list(open_trace(trace, format=trace_format, seed=seed, num_requests=num_requests))
    acceptance = _acceptance(drafter, acceptance_rate, acceptance_rates, acceptance_length)
    deployment = Deployment(
        layout,
        work,
        device,
        parallel,
        speculative=drafter,
        acceptance=acceptance,
        measure_drafts=drafter is not None and acceptance is None and drafter.is_lookup and _has_ids(requests),
        efficiency=load_efficiency(efficiency),
        kernel_curves=None if kernel_curves is None else read_kernel_curves(kernel_curves),
        offload=offload_of(
            device,
            offload_tiers=offload_tiers,
            kv_transfer_config=kv_transfer_config,
            offload_write_policy=offload_write_policy,
            offload_windows=offload_windows,
            offload_rules=offload_rules,
            preemption=preemption,
            swap_space=swap_space,
        ),
        **flags,
    )
    return deployment, requests


def _acceptance(
    drafter: SpeculativeConfig | None, rate: float | None, rates: str | None, length: float | None
) -> Acceptance | None:
    given = [value for value in (rate, rates, length) if value is not None]
    if not given:
        return drafter.acceptance if drafter else None
    if drafter is None:
        raise ConfigError("acceptance is about drafts; give --speculative-config")
    if len(given) > 1:
        raise ConfigError("give one of --acceptance-rate, --acceptance-rates and --acceptance-length")
    drafts = drafter.num_speculative_tokens
    if rate is not None:
        return Acceptance.from_rate(rate, drafts)
    if length is not None:
        return Acceptance.from_length(length, drafts)
    assert rates is not None
    try:
        values = [float(part) for part in rates.split(",")]
    except ValueError:
        raise ConfigError(f"--acceptance-rates {rates[:60]!r} must be numbers with commas between them") from None
    if len(values) != drafts:
        raise ConfigError(f"--acceptance-rates has {len(values)} rates for {drafts} drafts")
    return Acceptance(values)


def _has_ids(requests: list[Request]) -> bool:
    return all(request.prompt_ids is not None and request.output_ids is not None for request in requests)


def _run(serve: Any, requests: list[Request], bar: bool) -> Run:
    """Run with a bar on stderr, if it is wanted and that is a terminal."""
    err = Console(stderr=True)
    columns = (TextColumn("serving"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not (bar and err.is_terminal)) as progress:
        task = progress.add_task("serving", total=len(requests))
        result: Run = serve(requests, lambda: progress.advance(task))
    return result


def _report(deployment: Deployment, run: Run, measures: Measures, wall_s: float) -> dict[str, Any]:
    settings = deployment.settings()
    prompts = sum(item.input_tokens for item in run.served)
    outputs = sum(item.output_tokens for item in run.served)
    drafts = run.drafts
    flags = asdict(settings)
    flags["rules"] = settings.rules.version
    return {
        "model": deployment.layout.name,
        "gpu": deployment.gpu.name,
        "tensor_parallel_size": deployment.parallel.tensor,
        "data_parallel_size": deployment.parallel.data,
        "pipeline_parallel_size": deployment.parallel.pipeline,
        "policy": deployment.policy,
        "settings": flags,
        "efficiency": asdict(deployment.efficiency),
        "weight_bytes_per_rank": int(deployment.cost().weight_bytes),
        "pool_bytes_per_rank": deployment.pool_bytes(),
        "requests": len(run.served),
        "refused": len(run.refused),
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "makespan_s": measures.makespan_s,
        "ttft_s": measures.ttft._asdict(),
        "tpot_s": measures.tpot._asdict(),
        "output_tokens_per_s": outputs / measures.makespan_s,
        "total_tokens_per_s": (prompts + outputs) / measures.makespan_s,
        "hit_rate": sum(item.hit_tokens for item in run.served) / prompts,
        "preemptions": run.preemptions,
        "computed_tokens": run.computed_tokens,
        "device_busy": run.busy_s / measures.makespan_s,
        "steps": run.steps,
        "drafts": {
            "num_drafts": drafts.num_drafts,
            "acceptance_rate": drafts.acceptance_rate,
            "mean_acceptance_length": drafts.mean_acceptance_length,
            "break_even_length": run.break_even_length,
            "per_position": list(drafts.acceptance_per_position[: settings.num_speculative_tokens]),
            "measured": deployment.measure_drafts,
        },
        "offload": _offload(run),
        "reasoning": run.reasoning._asdict() if run.reasoning else None,
        "timeline": [
            {"time_s": at, "running": running, "waiting": waiting, "memory": memory._asdict()}
            for at, running, waiting, memory, _ in run.samples
        ],
        "notes": [*deployment.notes(), *_advice(deployment, run)],
        "simulator": {
            "wall_s": wall_s,
            "us_per_step": 1e6 * wall_s / run.steps,
            "us_per_request": 1e6 * wall_s / len(run.served),
        },
    }


def _advice(deployment: Deployment, run: Run) -> list[str]:
    """What the cost model says of the drafts at the batch and context that the run had."""
    if run.draft_shape is None or not run.drafts.num_drafts:
        return []
    drafts = deployment.settings().num_speculative_tokens
    rates = [rate or 0.0 for rate in run.drafts.acceptance_per_position[:drafts]]
    batch, context = (max(round(size), 1) for size in run.draft_shape)
    return advise(deployment.cost(), rates, batch, context).sentences(drafts, batch)


def _offload(run: Run) -> dict[str, Any] | None:
    """What the tiers did, over all ranks: the share of prompts that each served, and bytes."""
    if not run.offload:
        return None
    prompts = sum(item.input_tokens for item in run.served)
    loaded = sum(item.loaded_tokens for item in run.served)
    hit = sum(item.hit_tokens for item in run.served)
    by_tier = [sum(rank.tier_tokens[number] for rank in run.offload) for number in range(len(run.offload[0].tiers))]
    total = sum(by_tier) or 1.0
    counts: Counter[str] = Counter()
    for rank in run.offload:
        counts.update(rank.counts)
    return {
        # Of prompts at their first admission; `loaded_tokens` has what preempted requests loaded back as well.
        "hit_rate_by_tier": {
            "device": (hit - loaded) / prompts,
            **{
                tier.name: loaded / prompts * tokens / total
                for tier, tokens in zip(run.offload[0].tiers, by_tier, strict=True)
            },
        },
        "loaded_tokens": sum(rank.loaded_tokens for rank in run.offload),
        "stored_bytes": sum(rank.stored_bytes for rank in run.offload),
        "swapped_out": sum(rank.swapped_out for rank in run.offload),
        "swapped_out_bytes": sum(rank.swapped_out_bytes for rank in run.offload),
        "stalled_s": sum(rank.stalled_s for rank in run.offload),
        "tiers_per_rank": [tier._asdict() for tier in run.offload[0].tiers],
        "counts": dict(counts),
    }


def _print(report: dict[str, Any]) -> None:
    out = console()
    settings, timeline = report["settings"], report["timeline"]
    devices = report["tensor_parallel_size"] * report["data_parallel_size"] * report["pipeline_parallel_size"]
    title = (
        f"{report['model']} on {devices} x {report['gpu']}, policy {report['policy']}: "
        f"{report['requests']:,} requests in {report['makespan_s']:,.1f} s"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("seconds", "mean", "p50", "p90", "p99"):
        table.add_column(heading, justify="left" if heading == "seconds" else "right")
    for name, key in (("time to first token", "ttft_s"), ("time per output token", "tpot_s")):
        values = Spread(**report[key])
        table.add_row(name, *(f"{value:.4f}" for value in values))
    out.print(table)
    out.print(
        f"throughput  {report['output_tokens_per_s']:,.1f} output tokens/s, "
        f"{report['total_tokens_per_s']:,.1f} in all; device busy {report['device_busy']:.1%}"
    )
    out.print(f"cache       {report['hit_rate']:.1%} of prompt tokens hit; {report['preemptions']:,} preemptions")
    if offload := report["offload"]:
        rates = ", ".join(f"{name} {rate:.1%}" for name, rate in offload["hit_rate_by_tier"].items())
        out.print(f"hits        {rates} of prompt tokens; {human_bytes(offload['stored_bytes'])} stored")
        for tier in offload["tiers_per_rank"]:
            size = tier["capacity"]
            out.print(
                f"tier        {tier['name']}: {1 - tier['free_bytes'] / size:.1%} of {human_bytes(size)} a rank used; "
                f"{human_bytes(tier['read_bytes'])} read, {human_bytes(tier['written_bytes'])} written, "
                f"{human_bytes(tier['evicted_bytes'])} evicted"
            )
        if offload["swapped_out"]:
            out.print(
                f"swapped     {offload['swapped_out']:,} requests, {human_bytes(offload['swapped_out_bytes'])}; steps "
                f"waited {offload['stalled_s']:.3f} s for it"
            )
    if report["drafts"]["num_drafts"]:
        out.print(f"drafts      {_drafts(report['drafts'])}")
    if thinking := report["reasoning"]:
        saved = thinking["tokens_asked"] - thinking["tokens_served"]
        out.print(
            f"thinking    {thinking['cut']:,} of {thinking['requests']:,} thoughts cut at the budget; ignoring it "
            f"would have cost {saved:,} tokens more"
        )
    out.print(
        f"limits      {settings['max_num_seqs']:,} requests, {settings['max_num_batched_tokens']:,} tokens a step, "
        f"max_model_len {settings['max_model_len']:,}; {report['refused']:,} requests refused as too long"
    )
    pool = report["pool_bytes_per_rank"] * report["data_parallel_size"]
    peak = max(timeline, key=lambda sample: sample["running"])
    out.print(f"peak        {peak['running']:,} running and {peak['waiting']:,} waiting at {peak['time_s']:,.1f} s")
    memory = Table(title=f"KV memory by cause ({human_bytes(pool)})", title_justify="left")
    for heading in ("cause", "mean of samples", "at the peak"):
        memory.add_column(heading, justify="left" if heading == "cause" else "right")
    for cause in timeline[0]["memory"]:
        mean = sum(sample["memory"][cause] for sample in timeline) / len(timeline)
        memory.add_row(cause, f"{mean / pool:.2%}", f"{peak['memory'][cause] / pool:.2%}")
    out.print(memory)
    simulator = report["simulator"]
    out.print(
        f"simulated {report['steps']:,} steps in {simulator['wall_s']:.1f} s, {simulator['us_per_step']:,.0f} us each"
    )
    if len(report["comparison"]) > 1:
        _print_comparison(out, report["comparison"])
    for note in report["notes"]:
        out.print(f"note: {note}", style="dim")


def _drafts(drafts: dict[str, Any]) -> str:
    """How drafts did, and whether they were worth it: a step with drafts takes longer, so it must bring more."""
    length, needed = drafts["mean_acceptance_length"], drafts["break_even_length"]
    of = "of drafts measured on the trace's tokens accepted" if drafts["measured"] else "accepted"
    text = f"{drafts['acceptance_rate']:.1%} {of}, {length:.2f} tokens a step"
    if needed is None:
        return text
    verdict = "speculation gains" if length > needed else "speculation loses"
    return f"{text}; {needed:.2f} are needed to break even: {verdict}"


def _print_comparison(out: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="Memory policies compared", title_justify="left")
    table.add_column("policy")
    for _, words, _ in COMPARED:
        table.add_column(words, justify="right")
    for row in rows:
        table.add_row(row["policy"], *(format(row[key], shown.replace("d", "")) for key, _, shown in COMPARED))
    out.print(table)
