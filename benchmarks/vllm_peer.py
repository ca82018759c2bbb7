"""The peer of `allocator.py`: vLLM's own `KVCacheManager`, driven as its scheduler drives it, in vLLM's own Python.

Not run by hand. Reads one JSON object a line on stdin, `{"do": NAME, ...arguments}`, and answers each with one line.
Knows nothing of kvtide. The groups are those that vLLM's planner makes of Gemma-3-27B: one of 10 full-attention layers
and six of 10 sliding-window layers (the last is padded). Settings are vLLM's defaults: SHA-256 block hashes, block 16.
Times are CPU seconds of this thread; what the scheduler does besides the KV cache is left out.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Answers go where stdout was; whatever the libraries print goes to stderr.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus  # noqa: E402

BLOCK = 16
GROUP_LAYERS = 10
WINDOW_GROUPS = 6
WINDOW_LAYERS = 52
WINDOW = 1024
SAMPLING = SamplingParams(max_tokens=1 << 20)
LAYER = {"block_size": BLOCK, "num_kv_heads": 16, "head_size": 128, "dtype": torch.bfloat16}


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peer:
    """One manager at a time; `setup` starts afresh."""

    def setup(self, memory: int, max_model_len: int, max_step_tokens: int, dense: bool) -> dict[str, Any]:
        """A new manager of `memory` bytes. `dense` caches every window block; vLLM's default keeps those at the end."""
        full = FullAttentionSpec(**LAYER)
        window = SlidingWindowSpec(sliding_window=WINDOW, **LAYER)
        groups = [KVCacheGroupSpec([f"full.{i}" for i in range(GROUP_LAYERS)], full)]
        for first in range(0, WINDOW_LAYERS, GROUP_LAYERS):
            layers = range(first, min(first + GROUP_LAYERS, WINDOW_LAYERS))
            groups.append(KVCacheGroupSpec([f"window.{i}" for i in layers], window))
        assert len(groups) == 1 + WINDOW_GROUPS
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._step_tokens = max_step_tokens
        self._running: list[Request] = []
        self._serial = 0
        self._manager = None
        gc.unfreeze()
        gc.collect()
        self._manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=memory // (GROUP_LAYERS * full.page_size_bytes),
                kv_cache_tensors=[],
                kv_cache_groups=groups,
                prefix_cache_retention_interval=None if dense else 0,
            ),
            max_model_len=max_model_len,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            max_in_flight_tokens=max_step_tokens,
            enable_caching=True,
        )
        return {"num_blocks": self._manager.block_pool.num_gpu_blocks}

    def start(self, prompts: Sequence[list[int]]) -> None:
        """Admit and prefill requests, and decode a first token; they keep running."""
        for prompt in prompts:
            request, _ = self._prefill(prompt)
            # The step after the prefill is the one that frees what has left the window.
            self._step([request], [0])
            self._running.append(request)

    def settle(self) -> None:
        """Take what exists out of the garbage collector's sight, as vLLM's engine core does."""
        gc.collect()
        gc.freeze()

    def decode(self, batch: int, steps: Sequence[list[int]]) -> float:
        """CPU seconds per decode step of the first `batch` running requests; `steps` are the tokens they are fed."""
        requests = self._running[:batch]
        begin = time.thread_time()
        for tokens in steps:
            self._step(requests, tokens)
        return (time.thread_time() - begin) / len(steps)

    def serve(self, prompt: list[int]) -> dict[str, Any]:
        """CPU seconds to admit, prefill and free one prompt, and how many tokens it hit."""
        begin = time.thread_time()
        request, hit = self._prefill(prompt)
        self._manager.free(request)
        return {"seconds": time.thread_time() - begin, "hit": hit}

    def fill(self, prompts: Sequence[list[int]]) -> None:
        """Leave prompts in the prefix cache."""
        for prompt in prompts:
            self.serve(prompt)

    def state(
        self, prompts: Sequence[list[int]], memory: int, max_model_len: int, max_step_tokens: int
    ) -> dict[str, Any]:
        """Resident bytes that a new manager and these running requests add; their own token lists are not counted."""
        gc.collect()
        before = resident_bytes()
        self.setup(memory, max_model_len, max_step_tokens, dense=False)
        self.start(prompts)
        gc.collect()
        lists = sum(sys.getsizeof(request._all_token_ids) for request in self._running)
        return {"bytes": resident_bytes() - before - lists}

    def _step(self, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        self._manager.new_step_starts()
        for request, token in zip(requests, tokens, strict=True):
            request.append_output_token_ids(token)
            blocks = self._manager.allocate_slots(request, 1)
            if blocks is None:
                raise RuntimeError("vLLM's pool is too small for this benchmark")
            blocks.get_block_ids(allow_none=True)
            request.num_computed_tokens += 1
        self._manager.take_new_block_ids()

    def _prefill(self, prompt: list[int]) -> tuple[Request, int]:
        manager = self._manager
        self._serial += 1
        request = Request(f"r{self._serial}", prompt, SAMPLING, None, block_hasher=self._hasher)
        hits, num_hit, _ = manager.get_computed_blocks(request)
        adopted = {"num_new_computed_tokens": num_hit, "new_computed_blocks": hits} if num_hit else {}
        done = num_hit
        while done < len(prompt):
            tokens = min(self._step_tokens, len(prompt) - done)
            manager.new_step_starts()
            blocks = manager.allocate_slots(request, tokens, **adopted)
            if blocks is None:
                raise RuntimeError("vLLM's pool is too small for this benchmark")
            if not request.num_computed_tokens:
                blocks = manager.get_blocks(request.request_id)
            blocks.get_block_ids()
            manager.take_new_block_ids()
            done += tokens
            request.num_computed_tokens = done
            request.status = RequestStatus.RUNNING
            adopted = {}
        return request, num_hit


def main() -> None:
    """Answer until stdin ends."""
    peer = Peer()
    _answer({"vllm": vllm.__version__, "peer python": sys.version.split()[0]})
    for line in sys.stdin:
        arguments = json.loads(line)
        _answer(getattr(peer, arguments.pop("do"))(**arguments))


def _answer(result: Any) -> None:
    ANSWERS.write(json.dumps(result) + "\n")
    ANSWERS.flush()


if __name__ == "__main__":
    main()
