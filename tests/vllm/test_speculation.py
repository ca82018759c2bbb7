"""N-gram speculation with a store: the same tokens, and what is stored is what an engine without drafts stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from engines import BLOCK, MakeEngine, References, lmdb, prompt, transfer

from kvtide.connectors.config import make_store

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
PROMPTS = [prompt(seed, 40) * 5 for seed in (80, 81)]
TOKENS = 150


def values(path: Path) -> dict[bytes, np.ndarray]:
    """All values of a store."""
    found = {}
    with make_store("LMDBConnector", {"path": str(path), "max_bytes": "256MiB"}) as store:
        for entry in list(store.scan()):
            header = store.headers([entry.key])[0]
            assert header is not None
            data = np.empty(header.raw_bytes, np.uint8)
            store.get_into([entry.key], [data])
            found[entry.key] = data.view(np.float32)
    return found


def test_drafts_are_never_stored(make_engine: MakeEngine, reference: References, tmp_path: Path) -> None:
    expected = reference("full", PROMPTS, TOKENS)
    drafting = make_engine("full", transfer(lmdb(tmp_path / "drafts")), speculative_config=NGRAM)
    answer = drafting.generate(PROMPTS, TOKENS)
    assert answer["tokens"] == expected
    assert answer["drafted"] > answer["accepted"] > 0  # some were right and some were not
    drafting.exit()

    plain = make_engine("full", transfer(lmdb(tmp_path / "plain")))
    assert plain.generate(PROMPTS, TOKENS)["tokens"] == expected
    plain.exit()
    stored, right = values(tmp_path / "drafts"), values(tmp_path / "plain")
    assert stored.keys() == right.keys()
    assert len(stored) == sum((len(one) + TOKENS - 1) // BLOCK for one in PROMPTS)
    for key, value in stored.items():
        np.testing.assert_allclose(value, right[key], rtol=1e-3, atol=1e-3)

    # And it serves: the turn after, whose prefix was decoded with drafts.
    again = make_engine("full", transfer(lmdb(tmp_path / "drafts")), speculative_config=NGRAM)
    longer = [one + said + prompt(90, 50) for one, said in zip(PROMPTS, expected, strict=True)]
    answer = again.generate(longer, TOKENS)
    assert answer["tokens"] == reference("full", longer, TOKENS)
    assert answer["cached"] == [(len(one) + TOKENS - 1) // BLOCK * BLOCK for one in PROMPTS]
    again.exit()
