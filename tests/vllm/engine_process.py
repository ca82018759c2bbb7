"""One vLLM engine in a process of its own, driven by lines of JSON; run by the Python that has vLLM.

    {"llm": {...}}                                       first line: what LLM is made with; "processes": vLLM's own
    {"do": "generate", "prompts": [[...]], "tokens": 8}  answers tokens, cached and external tokens of each prompt
    {"do": "reset"}                                      empties the device's prefix cache, keeps the store
    {"do": "unwritable"}                                 this process can write to no file until "writable"
    {"do": "sabotage", "groups": [0]}                    from now on what is loaded is zeros; of all groups by default
    {"do": "counts"}, {"do": "wait", "seconds": 1}       nothing, or nothing for a while
    {"do": "exit"}                                       shuts the engine down in order

Every answer has `counts`, the connector's own. Output of vLLM goes to stderr.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1")


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())["llm"]
    alone = not settings.pop("processes", False)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not alone))
    from vllm import LLM, SamplingParams

    def say(**what: object) -> None:
        print(json.dumps(what), file=out, flush=True)

    llm = LLM(skip_tokenizer_init=True, enforce_eager=True, seed=0, disable_log_stats=False, **settings)
    if not alone:
        serve_plainly(llm, SamplingParams, say)
        return
    core = llm.llm_engine.engine_core.engine_core
    scheduler = core.scheduler
    say(
        groups=[type(group.kv_cache_spec).__name__ for group in scheduler.kv_cache_config.kv_cache_groups],
        blocks=scheduler.kv_cache_config.num_blocks,
        executor=type(core.model_executor).__name__,
    )
    preemptions = 0
    original = scheduler._preempt_request

    def preempt(*args: object, **kwargs: object) -> None:
        nonlocal preemptions
        preemptions += 1
        original(*args, **kwargs)

    scheduler._preempt_request = preempt
    drafted = accepted = 0
    observe = scheduler.make_spec_decoding_stats

    def drafts(stats: object, *args: object, **kwargs: int) -> object:
        nonlocal drafted, accepted
        drafted += kwargs["num_draft_tokens"]
        accepted += kwargs["num_accepted_tokens"]
        return observe(stats, *args, **kwargs)

    scheduler.make_spec_decoding_stats = drafts

    def counts() -> dict[str, int]:
        connectors = getattr(scheduler.connector, "sub_connectors", [scheduler.connector])
        total: dict[str, int] = {}
        for connector in connectors:
            for name, count in getattr(connector, "counts", {}).items():
                total[name] = total.get(name, 0) + count
        return total

    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "generate":
            sampling = SamplingParams(max_tokens=command["tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
            prompts = [
                {"prompt_token_ids": prompt} | ({"cache_salt": command["salt"]} if command.get("salt") else {})
                for prompt in command["prompts"]
            ]
            start = time.perf_counter()
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - start
            while scheduler.has_requests():  # what a server does anyway: the last saves are copied, their blocks freed
                llm.llm_engine.step()
            say(
                tokens=[list(output.outputs[0].token_ids) for output in outputs],
                reasons=[output.outputs[0].finish_reason for output in outputs],
                cached=[output.num_cached_tokens for output in outputs],
                ttft=[output.metrics.first_token_latency for output in outputs],
                seconds=seconds,
                preemptions=preemptions,
                drafted=drafted,
                accepted=accepted,
                counts=counts(),
            )
        elif command["do"] == "counts":
            say(counts=counts())
        elif command["do"] == "wait":
            time.sleep(command["seconds"])
            say(counts=counts())
        elif command["do"] == "unwritable":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            say(counts=counts())
        elif command["do"] == "writable":
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            say(counts=counts())
        elif command["do"] == "sabotage":
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            for part in get_kv_transfer_group().worker._parts:
                if part.group.index not in command.get("groups", [part.group.index]):
                    continue
                write = part.pages.write
                part.pages.write = lambda blocks, values, write=write: write(blocks, values * 0)
            say(counts=counts())
        elif command["do"] == "reset":
            say(done=llm.reset_prefix_cache(), counts=counts())
        elif command["do"] == "exit":
            llm.llm_engine.engine_core.shutdown()
            say(counts=counts())
            return


def serve_plainly(llm: Any, sampling_params: Any, say: Callable[..., None]) -> None:
    """The same commands where scheduler and workers are other processes, as they are by default."""
    say()
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "generate":
            sampling = sampling_params(max_tokens=command["tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
            outputs = llm.generate([{"prompt_token_ids": one} for one in command["prompts"]], sampling, use_tqdm=False)
            say(
                tokens=[list(output.outputs[0].token_ids) for output in outputs],
                cached=[output.num_cached_tokens for output in outputs],
            )
        elif command["do"] == "reset":
            time.sleep(1)  # until the last saves' blocks are free
            say(done=llm.reset_prefix_cache())
        elif command["do"] == "exit":
            llm.llm_engine.engine_core.shutdown()
            say()
            return


if __name__ == "__main__":
    main()
