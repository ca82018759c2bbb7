"""Real vLLM's Scheduler and KVCacheManager, driven without a model, in vLLM's own Python. Knows nothing of kvtide.

Reads one scenario (JSON) a line on stdin and answers each with one line: what the scheduler decided, step by step. See
`test_against_vllm.py` for the scenario's fields.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections import deque
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Answers go where stdout was; whatever the libraries print goes to stderr.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.config import (  # noqa: E402
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

LAYER = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 65536,
    "torch_dtype": "bfloat16",
}


def group_of(number: int, kind: str, reach: int, block_size: int) -> KVCacheGroupSpec:
    """One group of one layer."""
    layer = {"block_size": block_size, **LAYER}
    if kind == "window":
        spec = SlidingWindowSpec(sliding_window=reach, **layer)
    elif kind == "chunk":
        spec = ChunkedLocalAttentionSpec(attention_chunk_size=reach, **layer)
    else:
        spec = FullAttentionSpec(**layer)
    return KVCacheGroupSpec([f"layer.{number}"], spec)


def scheduler_of(scenario: dict[str, Any], folder: str) -> Scheduler:
    """vLLM's scheduler with the scenario's settings."""
    settings = scenario["settings"]
    (Path(folder) / "config.json").write_text(json.dumps(MODEL))
    model = ModelConfig(
        model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=settings["max_model_len"], seed=0
    )
    parallel = ParallelConfig()
    drafts = settings["num_speculative_tokens"]
    speculative = None
    if drafts:
        speculative = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=drafts,
            prompt_lookup_max=3,
            prompt_lookup_min=2,
            target_model_config=model,
            target_parallel_config=parallel,
        )
    cache = CacheConfig(
        block_size=settings["block_size"],
        enable_prefix_caching=settings["enable_prefix_caching"],
    )
    cache.num_gpu_blocks = scenario["num_blocks"]
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        parallel_config=parallel,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=settings["max_num_seqs"],
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            max_model_len=settings["max_model_len"],
            is_encoder_decoder=False,
            enable_chunked_prefill=settings["enable_chunked_prefill"],
            long_prefill_token_threshold=settings["long_prefill_token_threshold"],
            policy=settings["scheduling_policy"],
            async_scheduling=False,
            watermark=settings["watermark"],
            scheduler_reserve_full_isl=settings["scheduler_reserve_full_isl"],
        ),
        speculative_config=speculative,
    )
    # vLLM refuses this with n-gram drafts, and a CPU changes both; the rules are the same for all drafters.
    config.scheduler_config.async_scheduling = settings["async_scheduling"]
    config.scheduler_config.max_num_seqs = settings["max_num_seqs"]
    # Set here, since vLLM would look for as many devices.
    config.parallel_config.pipeline_parallel_size = settings["pipeline_parallel_size"]
    cls = AsyncScheduler if settings["async_scheduling"] else Scheduler
    scheduler = cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=scenario["num_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=[
                group_of(i, kind, reach, settings["block_size"]) for i, (kind, reach) in enumerate(scenario["groups"])
            ],
            prefix_cache_retention_interval=None if scenario["dense"] else 0,
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=settings["block_size"],
        log_stats=False,
    )
    scheduler.num_lookahead_tokens = settings["lookahead_tokens"]
    scheduler.use_v2_model_runner = settings["pipeline_parallel_size"] > 1  # the one that runs stages asynchronously
    # vLLM's own rule for engines whose freed blocks must not be written while a step is in flight.
    scheduler.defer_block_free = scenario["defer_free"]
    return scheduler


class Drive:
    """One scenario from its first request to its last."""

    def __init__(self, scenario: dict[str, Any], folder: str) -> None:
        self.scenario = scenario
        self.scheduler = scheduler_of(scenario, folder)
        settings = scenario["settings"]
        self.depth = settings["pipeline_parallel_size"] + settings["async_scheduling"]
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(scenario["settings"]["block_size"], sha256)
        self.hits: dict[str, int] = {}
        self.preempted: list[str] = []
        self._listen()

    def _listen(self) -> None:
        preempt = self.scheduler._preempt_request

        def heard(request: Request, *args: Any, **kwargs: Any) -> None:
            self.preempted.append(request.request_id)
            preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = heard

    def run(self) -> list[dict[str, Any]]:
        """The steps' decisions."""
        waiting = deque(self.scenario["requests"])
        queue: deque[Any] = deque()
        steps: list[dict[str, Any]] = []
        scheduled_calls = 0
        while waiting or self.scheduler.has_unfinished_requests() or queue:
            while waiting and waiting[0]["at"] <= scheduled_calls:
                self._add(waiting.popleft())
            if len(queue) < self.depth:
                output = self.scheduler.schedule()
                scheduled_calls += 1
                if output.total_num_scheduled_tokens:
                    queue.append(output)
                    steps.append(self._seen(output))
                    if len(queue) < self.depth:
                        continue
            if queue:
                self._update(queue.popleft())
            elif scheduled_calls > 100_000:
                raise RuntimeError("no progress")
        return steps

    def _add(self, item: dict[str, Any]) -> None:
        sampling = SamplingParams(max_tokens=len(item["output"]), ignore_eos=True)
        request = Request(
            item["id"],
            item["prompt"],
            sampling,
            None,
            arrival_time=float(item["arrival"]),
            block_hasher=self.hasher,
            priority=item["priority"],
        )
        request.planned_output = item["output"]
        self.scheduler.add_request(request)

    def _seen(self, output: Any) -> dict[str, Any]:
        new = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        for number, request_id in enumerate(cached.req_ids):
            if request_id in cached.resumed_req_ids:
                new[request_id] = cached.num_computed_tokens[number]
        self.admitted = set(new)
        output.padded = {name for name in new if self.scheduler.requests[name].is_prefill_chunk is False} & set(
            output.scheduled_spec_decode_tokens
        )
        preempted, self.preempted = self.preempted, []
        return {
            "tokens": list(output.num_scheduled_tokens.items()),
            "drafts": {name: len(ids) for name, ids in output.scheduled_spec_decode_tokens.items()},
            "hits": new,
            "preempted": preempted,
            "free": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }

    def _update(self, output: Any) -> None:
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests.get(name)
            if request is None:
                sampled.append([])
                continue
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            done = request.num_output_tokens
            computed = output.computed_before[name] + output.num_scheduled_tokens[name]
            if computed < output.known_before[name]:
                sampled.append([])
                continue
            accepted = 0 if name in output.padded else (7 * int(name) + 3 * done) % (drafts + 1)
            tokens = request.planned_output[done : done + 1 + accepted]
            sampled.append(tokens + [0] * (1 + accepted - len(tokens)))
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        drafts = self.scenario["settings"]["num_speculative_tokens"]
        if drafts and not self.scenario["settings"]["async_scheduling"]:
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[1] * drafts for _ in names]))


def remember_positions(scheduler: Scheduler) -> None:
    """Note with every step where its requests stood before it, which vLLM's output does not say for all."""
    schedule = scheduler._update_after_schedule

    def update(output: Any) -> None:
        output.computed_before, output.known_before = {}, {}
        for name in output.num_scheduled_tokens:
            request = scheduler.requests[name]
            output.computed_before[name] = request.num_computed_tokens
            output.known_before[name] = request.num_tokens + request.num_output_placeholders
        schedule(output)

    scheduler._update_after_schedule = update


def main() -> None:
    """Answer until stdin ends."""
    _answer({"vllm": vllm.__version__})
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            try:
                drive = Drive(json.loads(line), folder)
                remember_positions(drive.scheduler)
                _answer(drive.run())
            except Exception:
                _answer({"failed": traceback.format_exc()})


def _answer(result: Any) -> None:
    ANSWERS.write(json.dumps(result) + "\n")
    ANSWERS.flush()


if __name__ == "__main__":
    main()
