"""Time to the first token of a long prompt in real vLLM: computed, and loaded from a store by KvtideConnector.

    VENV/bin/python benchmarks/vllm_ttft.py [--tokens 4096] [--kind hybrid|full] [--turns 5]

Run by a Python with vLLM for CPUs, kvtide and what it needs. The model is small (8 layers, 768 wide) and has random
weights: what is measured is the ratio between computing and loading a prompt on this machine. One engine computes and
stores the prompts and ends. Then three engines, each in a process of its own, are asked in turns for the same prompts,
none of which shares its beginning with another:

    recompute      no connector
    store          with an empty store: what looking up and saving cost
    load           with the store of the first engine
    rest           the engine without a connector, for a prompt of the tokens that `load` has to compute
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
BLOCK = 32


def main() -> None:
    """Run the benchmark, or one of its engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--kind", choices=("hybrid", "full"), default="hybrid")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine is not None:
        serve(json.loads(arguments.engine))
        return
    with tempfile.TemporaryDirectory() as root:
        make_model(arguments.kind, Path(root) / "model", arguments.tokens)
        prompts = [prompt(turn, arguments.tokens) for turn in range(arguments.turns + 1)]
        first = Engine(root, "kv", arguments.tokens)
        for one in prompts:
            first.ask(one)
        first.end()
        engines = {
            "recompute": Engine(root, None, arguments.tokens),
            "store": Engine(root, "other", arguments.tokens),
            "load": Engine(root, "kv", arguments.tokens),
        }
        results: dict[str, list[dict[str, Any]]] = {}
        for turn, one in enumerate(prompts):
            answers = {name: engine.ask(one) for name, engine in engines.items()}
            answers["rest"] = engines["recompute"].ask(prompt(turn, arguments.tokens - answers["load"]["cached"])[::-1])
            if turn > 0:  # the first warms up
                for name, answer in answers.items():
                    results.setdefault(name, []).append(answer)
        for engine in engines.values():
            engine.end()
    report(arguments, results)


def prompt(turn: int, length: int) -> list[int]:
    """Tokens that no other turn's prompt begins with."""
    return [5 + (turn * 131 + at * 7 + at * at % 11) % 500 for at in range(length)]


class Engine:
    """One engine, in a process of its own."""

    def __init__(self, root: str, store: str | None, tokens: int) -> None:
        path = store and f"{root}/{store}"
        task = json.dumps({"model": f"{root}/model", "path": path, "tokens": tokens})
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--engine", task],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._hear()

    def ask(self, tokens: list[int]) -> dict[str, Any]:
        """Seconds to the first token, tokens that were not computed, and the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(tokens) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def end(self) -> None:
        """Shut it down in order."""
        self._process.communicate()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("an engine died; see its output above")
        return dict(json.loads(line))


def serve(task: dict[str, Any]) -> None:
    """Answer prompts from stdin until it ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    store = {"path": task["path"], "max_bytes": "4GiB"}
    transfer = task["path"] and {
        "kv_connector": "KvtideConnector",
        "kv_connector_module_path": "kvtide.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": {"kv_connector": "LMDBConnector", "kv_connector_extra_config": store}},
    }
    llm = LLM(
        model=task["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        block_size=BLOCK,
        max_model_len=task["tokens"] + 64,
        disable_log_stats=False,
        kv_transfer_config=transfer,
    )
    core = llm.llm_engine.engine_core.engine_core
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False)
    print("{}", file=out, flush=True)
    for line in sys.stdin:
        output = llm.generate([{"prompt_token_ids": json.loads(line)}], sampling, use_tqdm=False)[0]
        while core.scheduler.has_requests():  # the last saves
            llm.llm_engine.step()
        answer = {
            "seconds": output.metrics.first_token_latency,
            "cached": output.num_cached_tokens,
            "tokens": list(output.outputs[0].token_ids),
        }
        print(json.dumps(answer), file=out, flush=True)
    llm.llm_engine.engine_core.shutdown()


def make_model(kind: str, directory: Path, max_tokens: int) -> None:
    """A model with random weights."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 512,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": max_tokens + 64,
    }
    model = (
        Gemma3ForCausalLM(Gemma3TextConfig(**sizes, sliding_window=512, query_pre_attn_scalar=64))
        if kind == "hybrid"
        else LlamaForCausalLM(LlamaConfig(**sizes))
    )
    model.to(torch.bfloat16).save_pretrained(directory)


def report(arguments: argparse.Namespace, results: dict[str, list[dict[str, Any]]]) -> None:
    """Print the fastest turns (other work on the machine only ever adds time) and their ratios to recomputing."""
    times = {name: [each["seconds"] * 1e3 for each in turns] for name, turns in results.items()}
    print(f"{arguments.kind}, {arguments.tokens} tokens, fastest of {arguments.turns} prompts (median)")
    for name, turns in results.items():
        fastest, cached = min(times[name]), min(each["cached"] for each in turns)
        print(
            f"  {name:10} {fastest:9.1f} ms ({statistics.median(times[name]):.1f})   "
            f"{min(times['recompute']) / fastest:6.2f} x   {cached} tokens not computed"
        )
    answers = [[each["tokens"] for each in results[name]] for name in ("recompute", "store", "load")]
    print(f"  answers {'are the same' if answers[0] == answers[1] == answers[2] else 'DIFFER'}")


if __name__ == "__main__":
    main()
