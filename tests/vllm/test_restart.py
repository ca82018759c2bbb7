"""Hybrid groups stay on; what one engine has stored the next one finds, with the same tokens as without a store."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import BLOCK, WINDOW, MakeEngine, References, lmdb, prompt, transfer

GROUPS = {"hybrid": ["SlidingWindowSpec"] * 5 + ["FullAttentionSpec"], "full": ["FullAttentionSpec"]}
PROMPTS = [prompt(1, 400), prompt(2, 333), prompt(3, 640)]
# With prompts of these lengths, the last block before the last token.
HITS = [384, 320, 608]
SHARED = 300  # tokens that the prompts of the sharing test have in common with the first one
INTERVAL = 4 * WINDOW


@pytest.mark.parametrize("kind", ["hybrid", "full"])
def test_restart_then_shared_prefixes(
    kind: str, make_engine: MakeEngine, reference: References, tmp_path: Path
) -> None:
    expected = reference(kind, PROMPTS)
    first = make_engine(kind, transfer(lmdb(tmp_path / "kv")))
    assert first.facts["groups"] == GROUPS[kind]
    answer = first.generate(PROMPTS)
    assert answer["tokens"] == expected
    assert answer["cached"] == [0, 0, 0]
    first.exit()

    second = make_engine(kind, transfer(lmdb(tmp_path / "kv")))
    answer = second.generate(PROMPTS)
    assert answer["tokens"] == expected
    assert answer["cached"] == HITS
    full_blocks, windows = sum(HITS) // BLOCK, len(HITS) * WINDOW // BLOCK * 5
    assert answer["counts"]["load_hit"] == full_blocks + (windows if kind == "hybrid" else 0)

    # Prompts that share a prefix only. Windows are there every four windows; all blocks of full attention are.
    again = [prompt(1, SHARED) + prompt(7, 200), prompt(1, SHARED) + prompt(8, 150)]
    whole = SHARED // BLOCK * BLOCK
    second.reset()
    answer = second.generate(again[:1])
    assert answer["tokens"] == reference(kind, again[:1])
    assert answer["cached"] == [whole // INTERVAL * INTERVAL if kind == "hybrid" else whole]
    # The first to share it has left a window where the common prefix ends.
    second.reset()
    answer = second.generate(again[1:])
    assert answer["tokens"] == reference(kind, again[1:])
    assert answer["cached"] == [whole]

    # A turn later: the prompt goes on where the answer ended.
    longer = [PROMPTS[0] + expected[0] + prompt(9, 40)]
    second.reset()
    answer = second.generate(longer)
    assert answer["tokens"] == reference(kind, longer)
    assert answer["cached"] == [(400 + 23) // BLOCK * BLOCK]

    # Other salts share nothing.
    second.reset()
    answer = second.generate(PROMPTS[:1], salt="tenant")
    assert answer["tokens"] == expected[:1]
    assert answer["cached"] == [0]

    # And these tests would notice wrong values: with zeros in the place of what was loaded, tokens differ.
    second.reset()
    second.ask("sabotage")
    answer = second.generate(PROMPTS)
    assert answer["cached"] == HITS
    assert all(got != right for got, right in zip(answer["tokens"], expected, strict=True))
    second.exit()
