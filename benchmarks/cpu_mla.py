"""MLA decode on this CPU beside what torch offers for the same paged cache, and where prefill changes form, in one run.

    python benchmarks/cpu_mla.py [--quick] [--json FILE]

8 requests of 4,096 cached tokens, 16 heads, one query token, latents of 512 + 64 in an arena of two layers, four times
as large as what is read, blocks of 64 in random order. Peers, which take turns with kvtide:

    sdpa    gather the latents of the batch into a buffer that is kept, then `scaled_dot_product_attention` with the
            latents as keys and as values (the fast kernel wants equal widths), query heads as rows
    flex    `flex_attention`, compiled, with a block mask that reads the pool in place (its blocks have 128 tokens and
            lie side by side, for its sake); left out with --quick, since it compiles for half a minute

Times are the fastest of many in which the contestants take turns: a busy neighbour only ever adds to them.

    decode_*         milliseconds of kvtide, and of the faster peer
    *_of_matmul      multiply-adds a second, as a share of what this machine does in a large matrix product
    prefill_change   new tokens a request from which decompressing is faster than absorbing, at 2,048 of context

The target of 1.2 times is not met on the two cores of a Sapphire Rapids with AMX: 1.11 in float32 and 1.05 in bfloat16.
kvtide and the faster peer read the same latents into a kept buffer and then run the same attention kernel of torch, on
both cores; kvtide only gathers two rows at a time, so that attention finds them in the last cache. Parts that fit the
second cache (256 to 1,024 keys) lose more to calls and to smaller products than they save, and there is nothing to
overlap, since gather and attention each use every core. More would take a kernel that reads the blocks in place.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import click
import torch
from report import Figure, Target, common_options, publish, scaled

from kvtide.kernels import LatentFormat, UpProjections, mla_decode, mla_prefill
from kvtide.kernels.reference import dequantise, quantise

LATENT, ROPE, HEADS, BLOCK = 512, 64, 16, 64
WIDTH = LATENT + ROPE
NOPE, VALUE = 128, 128
SCALE = 192**-0.5
FLEX_BLOCK = 128
TARGET = Target("ratio", ">=", 1.2)


@dataclass(frozen=True)
class Sizes:
    """How large a run is."""

    batch: int = 8
    kv: int = 4096
    repetitions: int = 25
    flex: bool = True
    product: int = 2048
    context: int = 2048
    new_tokens: tuple[int, ...] = (32, 64, 96, 128, 192, 256, 384, 512)
    prefill_repetitions: int = 5


FULL = Sizes()
QUICK = Sizes(repetitions=9, flex=False, new_tokens=(64, 128, 192, 256, 384), prefill_repetitions=2)
SMOKE = Sizes(2, 128, 1, False, 128, 64, (8, 32), 1)


class Pool:
    """A paged cache of one format, and a decode step over it."""

    def __init__(self, fmt: LatentFormat, sizes: Sizes, dtype: torch.dtype) -> None:
        self.fmt, self.sizes = fmt, sizes
        self.columns = sizes.kv // BLOCK
        blocks = 4 * sizes.batch * self.columns
        # Two layers side by side: the pages of one do not touch.
        storage = torch.empty((blocks, 2, BLOCK, fmt.width(LATENT, ROPE)), dtype=fmt.storage_dtype)
        self.cache = storage[:, 1]
        for first in range(0, blocks, 256):
            part = self.cache[first : first + 256]
            part.copy_(quantise(torch.randn(*part.shape[:2], WIDTH), fmt, LATENT, ROPE))
        self.table = torch.randperm(blocks)[: sizes.batch * self.columns].int().view(sizes.batch, self.columns)
        self.seq_lens = torch.full((sizes.batch,), sizes.kv, dtype=torch.int32)
        self.query = torch.randn(sizes.batch, 1, HEADS, WIDTH).to(dtype)
        self.out = torch.empty(sizes.batch, 1, HEADS, LATENT, dtype=dtype)
        self.lse = torch.empty(sizes.batch, 1, HEADS)
        shape = (sizes.batch * self.columns, BLOCK, self.cache.shape[2])
        self._gathered = torch.empty(shape, dtype=fmt.storage_dtype)

    def kvtide(self) -> None:
        """One step by kvtide."""
        mla_decode(
            self.query, self.cache, self.table, self.seq_lens, scale=SCALE, out=self.out, lse=self.lse, backend="CPU"
        )

    def sdpa(self) -> torch.Tensor:
        """The same by a gather and torch's attention."""
        is_bytes = self.fmt.storage_dtype.itemsize == 1
        cache, out = (t.view(torch.uint8) if is_bytes else t for t in (self.cache, self._gathered))
        torch.index_select(cache, 0, self.table.view(-1), out=out)
        keys = self._gathered
        if keys.dtype != self.query.dtype:
            keys = dequantise(keys, self.fmt, LATENT, ROPE, dtype=self.query.dtype)
        keys = keys.view(self.sizes.batch, 1, self.sizes.kv, WIDTH)
        # [batch, one head, heads as rows, width]: what is called q_len in `query` stands where SDPA has its heads.
        return torch.nn.functional.scaled_dot_product_attention(self.query, keys, keys, scale=SCALE)[..., :LATENT]

    def flex(self) -> Callable[[], torch.Tensor]:
        """The same step by compiled flex attention over a pool of its own."""
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        batch, columns = self.sizes.batch, self.sizes.kv // FLEX_BLOCK
        blocks = 4 * batch * columns
        pool = torch.randn(1, 1, blocks * FLEX_BLOCK, WIDTH).to(self.query.dtype)
        indices = torch.zeros(1, batch, 1, blocks, dtype=torch.int32)
        indices[..., :columns] = torch.randperm(blocks)[: batch * columns].view(1, batch, 1, columns)
        counts = torch.full((1, batch, 1), columns, dtype=torch.int32)
        mask = BlockMask.from_kv_blocks(
            torch.zeros_like(counts),
            torch.zeros_like(indices),
            counts,
            indices,
            BLOCK_SIZE=(FLEX_BLOCK, FLEX_BLOCK),
            seq_lengths=(HEADS, blocks * FLEX_BLOCK),
        )
        compiled = torch.compile(flex_attention)
        # Requests as heads that share one key head: a request's query heads are its rows.
        query = self.query.view(1, batch, HEADS, WIDTH)
        return lambda: compiled(query, pool, pool, block_mask=mask, scale=SCALE, enable_gqa=True)

    def check(self) -> None:
        """Both must compute the same."""
        self.kvtide()
        worst = (self.out.float() - self.sdpa().float()).abs().max() / self.out.abs().max()
        if not worst < 0.05:
            raise click.ClickException(f"kvtide and the peer differ by {worst:.2g} in {self.fmt.value}")


def timed(step: Callable[[], object]) -> Callable[[], float]:
    """Seconds that one call takes."""

    def run() -> float:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    return run


def fastest(repetitions: int, *contestants: Callable[[], float] | None) -> list[float | None]:
    """Run the contestants in turn, `repetitions` times over; each one's best. A turn is two calls: the first warms."""
    best = [math.inf] * len(contestants)
    for _ in range(repetitions):
        for i, contestant in enumerate(contestants):
            if contestant is not None:
                contestant()
                best[i] = min(best[i], contestant())
    return [None if math.isinf(seconds) else seconds for seconds in best]


def measure_decode(sizes: Sizes) -> list[Figure]:
    """Every format against the peers."""
    figures = []
    cases = (
        (LatentFormat.FLOAT32, torch.float32, sizes.flex, TARGET),
        (LatentFormat.BFLOAT16, torch.bfloat16, sizes.flex, TARGET),
        (LatentFormat.FLOAT16, torch.float16, False, None),
        (LatentFormat.FP8, torch.bfloat16, False, None),
        (LatentFormat.FP8_DS, torch.bfloat16, False, None),
    )
    for fmt, dtype, with_flex, target in cases:
        pool = Pool(fmt, sizes, dtype)
        pool.check()
        large = torch.randn(2, sizes.product, sizes.product).to(dtype)
        rounds = sizes.repetitions if target is not None else max(1, sizes.repetitions // 3)
        ours, sdpa, flex, product = fastest(
            rounds,
            timed(pool.kvtide),
            timed(pool.sdpa),
            timed(pool.flex()) if with_flex else None,
            timed(lambda large=large: large[0] @ large[1]) if target is not None else None,
        )
        assert ours is not None
        name = fmt.value.removesuffix("_mla")
        peers = {"sdpa": sdpa, "flex": flex}
        best = min((seconds for seconds in peers.values() if seconds is not None), default=None)
        figures.append(
            Figure(f"decode_{name}", 1e3 * ours, "ms", scaled(best, 1e3), target, "the faster peer of those below")
        )
        for peer, seconds in peers.items():
            if seconds is not None and with_flex:
                figures.append(Figure(f"decode_{name}_{peer}", 1e3 * ours, "ms", 1e3 * seconds, None, f"peer: {peer}"))
        if product is not None:
            rate = sizes.batch * sizes.kv * HEADS * (WIDTH + LATENT) / ours
            share = rate / (sizes.product**3 / product)
            figures.append(Figure(f"{name}_of_matmul", share, "fraction", note="of the rate of a large product"))
    return figures


def measure_prefill(sizes: Sizes) -> Figure:
    """The number of new tokens from which decompressed prefill is the faster one."""
    dtype = torch.bfloat16
    weights = torch.randn(HEADS, NOPE, LATENT) / 22, torch.randn(HEADS, LATENT, VALUE) / 22
    projections = UpProjections(*(weight.to(dtype) for weight in weights))
    blocks = -(-sizes.context // BLOCK)
    cache = torch.randn(blocks, BLOCK, WIDTH).to(dtype)
    table = torch.randperm(blocks).int()[None]
    gains = []
    for count in sizes.new_tokens:
        query, latent = torch.randn(count, HEADS, NOPE + ROPE).to(dtype), torch.randn(count, WIDTH).to(dtype)

        def run(mode: str, query: torch.Tensor = query, latent: torch.Tensor = latent) -> None:
            mla_prefill(
                query,
                latent,
                [0, len(query)],
                cache,
                table,
                [sizes.context],
                projections,
                scale=SCALE,
                mode=mode,
            )

        absorbed, decompressed = fastest(
            sizes.prefill_repetitions,
            timed(lambda run=run: run("absorbed")),
            timed(lambda run=run: run("decompressed")),
        )
        assert absorbed is not None
        assert decompressed is not None
        click.echo(
            f"prefill of {count:4}: absorbed {1e3 * absorbed:7.1f} ms, decompressed {1e3 * decompressed:7.1f} ms"
        )
        gains.append(math.log(absorbed / decompressed))
    change = None
    for (low, below), (high, above) in itertools.pairwise(zip(sizes.new_tokens, gains, strict=True)):
        if below < 0 <= above:
            change = low + (high - low) * below / (below - above)
    note = f"by arithmetic {projections.absorbed_below:.0f}"
    return Figure("prefill_change", change, "tokens", note=note)


@click.command()
@common_options
def main(quick: bool, smoke: bool, json_file: Path | None) -> None:
    """Measure MLA decode on this CPU beside torch's own attention, and where prefill changes form."""
    torch.manual_seed(0)
    sizes = SMOKE if smoke else QUICK if quick else FULL
    figures = [*measure_decode(sizes), measure_prefill(sizes)]
    title = f"kvtide MLA on a CPU, {torch.get_num_threads()} threads (peer: torch)"
    publish(title, figures, json_file, {"torch": metadata.version("torch")})


if __name__ == "__main__":
    main()
