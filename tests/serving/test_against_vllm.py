"""Decision for decision against real vLLM: its Scheduler and KVCacheManager on the same requests.

`KVTIDE_VLLM_PYTHON` names the Python of an environment that has vLLM (0.32 was used); without it the tests are skipped.
kvtide runs under the `grouped` geometry, whose blocks are vLLM's. Acceptance of drafts is a fixed function of request
and position, so that both sides see the same. Compared per step: tokens of each request in order, drafts, hits of those
admitted, preemptions in order, and free blocks.

What may differ is named in `scheduler.py`, and each difference has a test here that pins it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtide.kvcache import ChunkedLocal, FullAttention, Layer, ModelLayout, SlidingWindow
from kvtide.kvcache.baselines import grouped_geometry
from kvtide.sims.serving.job import Job
from kvtide.sims.serving.scheduler import Scheduler
from kvtide.sims.serving.settings import EngineSettings

BLOCK = 16
DIMS = {"num_kv_heads": 2, "head_dim": 32, "head_dim_v": 32}
FULL = [["full", 0]]
HYBRID = [["full", 0], ["window", 50]]
CHUNKED = [["full", 0], ["chunk", 64]]


class Peer:
    """The running peer."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, Path(__file__).with_name("vllm_scheduler_peer.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parent,  # at the top of the repository its `kernels` would hide Hugging Face's
        )
        self.version = self._receive()["vllm"]

    def run(self, scenario: dict[str, Any]) -> list[dict[str, Any]]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(scenario) + "\n")
        self._process.stdin.flush()
        answer = self._receive()
        assert isinstance(answer, list), answer["failed"]
        return answer

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the vLLM peer has ended"
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def vllm() -> Iterator[Peer]:
    python = os.environ.get("KVTIDE_VLLM_PYTHON")
    if not python:
        pytest.skip("KVTIDE_VLLM_PYTHON names no Python with vLLM")
    peer = Peer(python)
    yield peer
    peer.close()


def settings_of(**changes: Any) -> EngineSettings:
    base = EngineSettings(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512, async_scheduling=False)
    return replace(base, **changes)


def requests(seed: int, count: int, *, prompt: int = 200, output: int = 60, shared: int = 0) -> list[dict[str, Any]]:
    """Random requests; `shared` tokens begin two of three prompts."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, 1000, shared).tolist()
    made, at = [], 0
    for number in range(count):
        own = rng.integers(0, 1000, rng.integers(1, prompt)).tolist()
        made.append(
            {
                "id": str(number),
                "prompt": (prefix if number % 3 else []) + own,
                "output": rng.integers(0, 1000, rng.integers(1, output)).tolist(),
                "at": at,
                "arrival": number,
                "priority": int(rng.integers(0, 3)),
            }
        )
        at += int(rng.integers(0, 6))
    return made


def scenario_of(
    groups: list[list[Any]],
    num_blocks: int,
    settings: EngineSettings,
    requests: list[dict[str, Any]],
    *,
    dense: bool = True,
    defer_free: bool = True,
) -> dict[str, Any]:
    """`num_blocks` are usable ones; vLLM keeps one more as its null block."""
    return {
        "groups": groups,
        "num_blocks": num_blocks + 1,
        "settings": asdict(settings),
        "requests": requests,
        "dense": dense,
        "defer_free": defer_free,
    }


def run_kvtide(scenario: dict[str, Any], settings: EngineSettings) -> list[dict[str, Any]]:
    """The same scenario through kvtide's scheduler."""
    specs = {
        "full": lambda reach: FullAttention(**DIMS),
        "window": lambda reach: SlidingWindow(**DIMS, window=reach),
        "chunk": lambda reach: ChunkedLocal(**DIMS, chunk=reach),
    }
    layers = [Layer(i, specs[kind](reach)) for i, (kind, reach) in enumerate(scenario["groups"])]
    geometry = replace(grouped_geometry(ModelLayout("tiny", tuple(layers)), BLOCK), one_table=False)
    scheduler = Scheduler(geometry, (scenario["num_blocks"] - 1) * geometry.page_bytes, settings)
    waiting = deque(scenario["requests"])
    queue: deque[Any] = deque()
    steps: list[dict[str, Any]] = []
    calls = 0
    while waiting or scheduler.has_work:
        while waiting and waiting[0]["at"] <= calls:
            item = waiting.popleft()
            prompt, output = np.array(item["prompt"]), np.array(item["output"])
            scheduler.add(Job(item["id"], prompt, output, item["arrival"], item["priority"]))
        if scheduler.can_schedule:
            step = scheduler.schedule()
            calls += 1
            if step:
                queue.append(step)
                steps.append(
                    {
                        "tokens": [[part.job.request_id, part.num_tokens] for part in step.parts],
                        "drafts": {part.job.request_id: part.num_drafts for part in step.parts if part.num_drafts},
                        "hits": {part.job.request_id: part.hit for part in step.parts if part.hit is not None},
                        "preempted": [job.request_id for job in step.preempted],
                        "free": free_blocks(scheduler),
                    }
                )
                if scheduler.can_schedule:
                    continue
        if queue:
            step = queue.popleft()
            scheduler.complete(step, [accepted(part) for part in step.parts])
            scheduler.manager.check()
    return steps


def free_blocks(scheduler: Scheduler) -> int:
    pool = scheduler.manager.pool
    return int(pool.num_pages - sum(pool.referenced))


def accepted(part: Any) -> int:
    if part.is_padding or not part.samples or part.job.finished:
        return 0
    return (7 * int(part.job.request_id) + 3 * part.job.num_output) % (part.num_drafts + 1)


def compare(vllm: Peer, scenario: dict[str, Any], settings: EngineSettings, *, blocks: bool = True) -> dict[str, int]:
    """Assert equal decisions in every step; what the scenario exercised."""
    theirs, ours = vllm.run(scenario), run_kvtide(scenario, settings)
    for number, (their, our) in enumerate(zip(theirs, ours, strict=False)):
        if not blocks:
            their.pop("free"), our.pop("free")
        assert our == their, f"step {number} of {len(theirs)}: kvtide {our} vLLM {their}"
    assert len(ours) == len(theirs)
    return {
        "steps": len(ours),
        "preemptions": sum(len(step["preempted"]) for step in ours),
        "hits": sum(sum(step["hits"].values()) for step in ours),
        "drafts": sum(sum(step["drafts"].values()) for step in ours),
    }


DRAFTS = {"num_speculative_tokens": 3, "lookahead_tokens": 3}
MODES = [
    pytest.param({"async_scheduling": asynchronous, **drafts}, id=f"{name}-{'drafts' if drafts else 'plain'}")
    for asynchronous, name in ((False, "sync"), (True, "async"))
    for drafts in ({}, DRAFTS)
]
NO_CACHE = {"enable_prefix_caching": False}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_full_attention_in_a_small_pool(vllm: Peer, mode: dict[str, Any], seed: int) -> None:
    settings = settings_of(**mode, **NO_CACHE)
    seen = compare(vllm, scenario_of(FULL, 36, settings, requests(seed, 24)), settings)
    assert seen["preemptions"]


@pytest.mark.parametrize("mode", MODES)
def test_preempted_requests_find_what_is_still_cached(vllm: Peer, mode: dict[str, Any]) -> None:
    settings = settings_of(**mode)
    seen = compare(vllm, scenario_of(FULL, 36, settings, requests(0, 24)), settings)
    assert seen["preemptions"]
    assert seen["hits"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, 2])
def test_shared_prefixes(vllm: Peer, mode: dict[str, Any], seed: int) -> None:
    settings = settings_of(**mode)
    seen = compare(vllm, scenario_of(FULL, 300, settings, requests(seed, 24, shared=100)), settings)
    assert seen["hits"] > 1000


@pytest.mark.parametrize("groups", [HYBRID, CHUNKED], ids=["window", "chunk"])
@pytest.mark.parametrize("drafts", [{}, DRAFTS], ids=["plain", "drafts"])
@pytest.mark.parametrize("seed", range(2))
def test_hybrid_models(vllm: Peer, groups: list[list[Any]], drafts: dict[str, Any], seed: int) -> None:
    settings = settings_of(**drafts)
    compare(vllm, scenario_of(groups, 400, settings, requests(seed, 24)), settings)


def turns(seed: int, count: int) -> list[dict[str, Any]]:
    """Conversations that grow, one turn at a time and each after the one before has ended."""
    rng = np.random.default_rng(seed)
    conversations = [rng.integers(0, 1000, rng.integers(60, 200)).tolist() for _ in range(4)]
    made = []
    for number in range(count):
        which = int(rng.integers(0, 4))
        conversations[which] += rng.integers(0, 1000, rng.integers(5, 40)).tolist()
        output = rng.integers(0, 1000, 8).tolist()
        prompt = list(conversations[which])
        made.append(
            {"id": str(number), "prompt": prompt, "output": output, "at": 14 * number, "arrival": number, "priority": 0}
        )
    return made


@pytest.mark.parametrize("groups", [FULL, HYBRID, CHUNKED], ids=["full", "window", "chunk"])
def test_conversations(vllm: Peer, groups: list[list[Any]]) -> None:
    settings = settings_of(max_model_len=1024)
    seen = compare(vllm, scenario_of(groups, 400, settings, turns(1, 24)), settings)
    assert seen["hits"] > 4000


@pytest.mark.parametrize(
    "changes",
    [
        {"scheduling_policy": "priority"},
        {"scheduling_policy": "priority", "async_scheduling": True, **DRAFTS},
        {"long_prefill_token_threshold": 20},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
        {"watermark": 0.2},
        {"scheduler_reserve_full_isl": False},
        {"max_model_len": 210, **DRAFTS},
        {"num_speculative_tokens": 2},
        {"max_num_seqs": 1},
    ],
    ids=lambda changes: ",".join(changes),
)
@pytest.mark.parametrize("num_blocks", [36, 100])
def test_settings(vllm: Peer, changes: dict[str, Any], num_blocks: int) -> None:
    settings = settings_of(**changes, **NO_CACHE)
    compare(vllm, scenario_of(FULL, num_blocks, settings, requests(7, 24)), settings)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("seed", range(2))
def test_pipeline_stages(vllm: Peer, asynchronous: bool, stages: int, seed: int) -> None:
    """As many steps in flight as there are stages; a request decodes once in a round of them."""
    settings = settings_of(async_scheduling=asynchronous, pipeline_parallel_size=stages, **NO_CACHE)
    seen = compare(vllm, scenario_of(FULL, 300, settings, requests(seed, 24)), settings)
    assert seen["steps"] > 100


# -- what differs, and why --------------------------------------------------------------------------------------------


def runs(vllm: Peer, scenario: dict[str, Any], settings: EngineSettings) -> tuple[int, list[Any], list[Any]]:
    """The first step that differs (or the number of steps), and both sides' steps."""
    theirs, ours = vllm.run(scenario), run_kvtide(scenario, settings)
    same = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), len(theirs))
    return same, theirs, ours


@pytest.mark.parametrize("groups", [HYBRID, CHUNKED], ids=["window", "chunk"])
def test_dead_blocks_come_back_at_commit(vllm: Peer, groups: list[list[Any]]) -> None:
    """vLLM has them a step later, so it holds more in a hybrid model with steps in flight; decisions are equal."""
    settings = settings_of(async_scheduling=True)
    _, theirs, ours = runs(vllm, scenario_of(groups, 400, settings, requests(1, 24)), settings)
    more = [our.pop("free") - their.pop("free") for our, their in zip(ours, theirs, strict=True)]
    assert min(more) == 0
    assert max(more) > 0
    assert ours == theirs


@pytest.mark.parametrize("groups", [HYBRID, CHUNKED], ids=["window", "chunk"])
def test_dead_blocks_at_commit_spare_a_preemption(vllm: Peer, groups: list[list[Any]]) -> None:
    """In a small pool vLLM preempts where only blocks that are dead already are in the way."""
    settings = settings_of(**NO_CACHE)
    step, theirs, ours = runs(vllm, scenario_of(groups, 60, settings, requests(0, 24)), settings)
    assert theirs[step]["preempted"]
    assert not ours[step]["preempted"]
    assert ours[step]["tokens"][: len(theirs[step]["tokens"])] == theirs[step]["tokens"]


def test_a_prefix_is_hit_once_it_is_committed(vllm: Peer) -> None:
    """vLLM hits blocks whose tokens are only scheduled; kvtide those whose tokens stand."""
    settings = settings_of()
    same = requests(0, 1)[0] | {"prompt": list(range(48)), "output": [1, 2]}
    twins = [same | {"id": "0"}, same | {"id": "1", "arrival": 1}]
    step, theirs, ours = runs(vllm, scenario_of(FULL, 100, settings, twins), settings)
    assert step == 0
    assert theirs[0]["hits"] == {"0": 0, "1": 32}
    assert ours[0]["hits"] == {"0": 0, "1": 0}
    later = [same | {"id": "0"}, same | {"id": "1", "arrival": 1, "at": 1}]
    compare(vllm, scenario_of(FULL, 100, settings, later), settings)


def test_windows_are_kept_where_a_prompt_parts(vllm: Peer) -> None:
    """By default vLLM keeps only the windows at the ends of prompts; kvtide keeps some room before them as well."""
    settings = settings_of(max_model_len=1024)
    step, theirs, ours = runs(vllm, scenario_of(HYBRID, 400, settings, turns(1, 24), dense=False), settings)
    assert sum(ours[step]["hits"].values()) > sum(theirs[step]["hits"].values())


def test_a_waiting_head_renews_what_it_would_hit(vllm: Peer) -> None:
    """A request at the head that does not fit looks its prefix up in every step; in kvtide that counts as a use."""
    settings = settings_of()
    step, theirs, ours = runs(vllm, scenario_of(FULL, 36, settings, requests(6, 24)), settings)
    hit, theirs_hit = ours[step]["hits"], theirs[step]["hits"]
    assert hit != theirs_hit
    assert sum(hit.values()) > sum(theirs_hit.values())


def test_blocks_of_a_step_in_flight_stay(vllm: Peer) -> None:
    """vLLM gives a victim's blocks away while its last step runs, unless a KV consumer is attached; kvtide waits."""
    settings = settings_of(async_scheduling=True, **NO_CACHE)
    scenario = scenario_of(FULL, 36, settings, requests(0, 24), defer_free=False)
    step, theirs, ours = runs(vllm, scenario, settings)
    assert theirs[step]["preempted"]
    assert not ours[step]["preempted"]
