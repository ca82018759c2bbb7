"""`kvtide demo`: the main job on what comes with the package, and a prefix that outlives its engine."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from kvtide.connectors.config import make_store
from kvtide.hma import HybridMemoryManager
from kvtide.kvcache import KvtideError, ModelLayout
from kvtide.offload.manager import OffloadManager
from kvtide.offload.policies import LoadPolicy
from kvtide.offload.transfers import Transfers

from .options import human_bytes
from .waste import command as waste

WASTE = ["--model", "gemma-3-27b", "--trace", "demo"]
MODEL = "gpt-oss-20b"
PROMPT = 2048


@click.command("demo")
def command() -> None:
    """Show what kvtide does, on a bundled model and trace: where memory goes, and a prefix kept in LMDB.

    \b
    Examples:
      kvtide demo
      kvtide waste --help
    """
    waste.main(WASTE, standalone_mode=False)
    prompt = np.random.default_rng(0).integers(0, 200_000, PROMPT)
    with tempfile.TemporaryDirectory(prefix="kvtide-demo-") as folder:
        first = _Engine(Path(folder))
        computed = first.compute(prompt)
        first.close()
        stored = first.offload.stats().bytes_by_kind
        second = _Engine(Path(folder))
        hit, found = second.load(prompt)
        second.close()
    for group, entries in found.items():
        if not entries or any(computed[group][block] != data for block, data in entries.items()):
            raise KvtideError(f"blocks of {group} did not come back from the store as they went in")
    layout = ModelLayout.preset(MODEL)
    click.echo(f"Offload to the embedded store (LMDB, in a temporary folder): {MODEL}, one prompt of {PROMPT:,} tokens")
    parts = ", ".join(f"{human_bytes(size)} of {kind.replace('_', ' ')}" for (_, kind), size in sorted(stored.items()))
    click.echo(f"  stored {parts}; all its tokens in all layers are {human_bytes(PROMPT * layout.bytes_per_token)}")
    click.echo(f"  a new engine found {hit:,} tokens there and read them back, byte for byte")


class _Engine:
    """A manager and an arena in host memory, with an LMDB store behind them; what it computes are random bytes."""

    def __init__(self, folder: Path) -> None:
        layout = ModelLayout.preset(MODEL)
        self.manager = HybridMemoryManager(layout, "256MiB", max_requests=1, max_step_tokens=PROMPT, model_id=MODEL)
        self.arena = np.zeros(self.manager.pool.num_pages * self.manager.geometry.page_bytes, dtype=np.uint8)
        self.store = make_store("LMDBConnector", {"path": str(folder), "max_bytes": "512MiB"})
        self.transfers = Transfers(self.arena, self.store, staging_bytes=64 << 20)
        always = LoadPolicy(seconds_per_token=1.0)  # nothing is computed here that a load could be slower than
        self.offload = OffloadManager(
            self.manager, self.transfers, model=MODEL, load_policy=always, max_held_bytes=128 << 20
        )

    def compute(self, prompt: npt.NDArray[np.int64]) -> dict[str, dict[tuple[int, int], bytes]]:
        """Prefill the prompt and store it; the blocks as they were computed, before windows slide."""
        row, hit = self._admit(prompt)
        self.manager.reserve([row], [len(prompt) - hit])
        rng = np.random.default_rng(1)
        for group in self.manager.groups:
            for start in self._starts(group.name, row).values():
                size = group.fmt.block_bytes
                self.arena[start : start + size] = rng.integers(0, 256, size, dtype=np.uint8)
        computed = self._held(row)
        self.offload.commit([row], [len(prompt) - hit])
        self.offload.release(row)
        if not self.transfers.drain(60):
            raise KvtideError("the store took more than a minute")
        return computed

    def load(self, prompt: npt.NDArray[np.int64]) -> tuple[int, dict[str, dict[tuple[int, int], bytes]]]:
        """Take the prompt from the store: tokens found, and the blocks that the row holds then."""
        row, hit = self._admit(prompt)
        return hit, self._held(row)

    def close(self) -> None:
        """End transfers, and close the store."""
        self.offload.close()
        self.store.close()

    def _admit(self, prompt: npt.NDArray[np.int64]) -> tuple[int, int]:
        row = self.offload.admit("prompt", prompt).row
        while not self.offload.ready(row):
            self.offload.poll()
        return row, int(self.manager.committed[row])

    def _starts(self, group: str, row: int) -> dict[tuple[int, int], int]:
        """Byte offsets of a row's blocks, by table and logical block."""
        logical, entries = self.manager.tables[group].held(row)
        unit = self.manager.geometry.unit
        return {
            (table, block): int(entry) * unit
            for table, of_table in enumerate(entries)
            for block, entry in zip(logical.tolist(), of_table, strict=True)
        }

    def _held(self, row: int) -> dict[str, dict[tuple[int, int], bytes]]:
        return {
            group.name: {
                place: self.arena[start : start + group.fmt.block_bytes].tobytes()
                for place, start in self._starts(group.name, row).items()
            }
            for group in self.manager.groups
        }
