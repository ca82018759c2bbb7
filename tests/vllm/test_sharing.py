"""Several engines and one store: at the same time, as producer and consumer, and with vLLM's MultiConnector."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import MakeEngine, References, prompt, shared, transfer

PROMPTS = [prompt(seed, 350) for seed in range(60, 66)]


@pytest.mark.parametrize("kind", ["hybrid", "full"])
def test_two_engines_at_once(kind: str, make_engine: MakeEngine, reference: References, tmp_path: Path) -> None:
    engines = [make_engine(kind, transfer(shared(tmp_path / "kv")), started=False) for _ in range(2)]
    for engine in engines:
        engine.start()
    expected = reference(kind, PROMPTS)
    halves = [PROMPTS[:4], PROMPTS[2:]]  # two of them in both
    for engine, half in zip(engines, halves, strict=True):
        engine.send(do="generate", prompts=half, tokens=24)
    assert [engine.hear()["tokens"] for engine in engines] == [expected[:4], expected[2:]]
    for engine in engines:
        engine.reset()
        engine.send(do="generate", prompts=PROMPTS, tokens=24)
    for engine in engines:
        answer = engine.hear()
        assert answer["tokens"] == expected
        assert min(answer["cached"]) > 0  # also what the other one computed
        engine.exit()


def test_producer_and_consumer(make_engine: MakeEngine, reference: References, tmp_path: Path) -> None:
    producer = make_engine("hybrid", transfer(shared(tmp_path / "kv"), "kv_producer"), started=False)
    consumer = make_engine("hybrid", transfer(shared(tmp_path / "kv"), "kv_consumer"), started=False)
    producer.start()
    consumer.start()
    expected = reference("hybrid", PROMPTS)
    answer = consumer.generate(PROMPTS[:2])
    assert answer["tokens"] == expected[:2]
    assert not any(name.startswith("save") for name in answer["counts"])
    assert producer.generate(PROMPTS)["tokens"] == expected
    producer.reset()
    answer = producer.generate(PROMPTS)
    assert answer["cached"] == [0] * len(PROMPTS)
    assert not any(name.startswith(("load", "look")) for name in answer["counts"])
    consumer.reset()
    answer = consumer.generate(PROMPTS)
    assert answer["tokens"] == expected
    assert min(answer["cached"]) > 0
    producer.exit()
    consumer.exit()


def test_multi_connector(make_engine: MakeEngine, reference: References, tmp_path: Path) -> None:
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [transfer(shared(tmp_path / "near")), transfer(shared(tmp_path / "far"))]
        },
    }
    engine = make_engine("hybrid", both)
    assert engine.facts["groups"] == ["SlidingWindowSpec"] * 5 + ["FullAttentionSpec"]
    expected = reference("hybrid", PROMPTS)
    assert engine.generate(PROMPTS)["tokens"] == expected
    for path in (tmp_path / "near").rglob("*"):
        if path.is_file() and path.stat().st_size > 4096:
            path.unlink()
    engine.reset()
    answer = engine.generate(PROMPTS)
    assert answer["tokens"] == expected
    assert min(answer["cached"]) > 0  # from the far one
    engine.exit()
