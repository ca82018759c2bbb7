"""Block copies within and between host memories; the CUDA path differs in the stream alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtide.kernels import copy, copy_blocks
from kvtide.kvcache import ConfigError


def memory(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)


def test_every_block_arrives_and_nothing_else_changes() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 3, 64):
        source, destination = memory(50 * size), memory(80 * size)
        count = 30
        starts = rng.permutation(50)[:count] * size
        ends = rng.permutation(80)[:count] * size
        before = destination.clone()
        assert copy_blocks(source, destination, starts, torch.from_numpy(ends), size) is None
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            before[end : end + size] = source[start : start + size]
        assert torch.equal(destination, before)


def test_neighbours_are_one_copy() -> None:
    starts, ends = np.array([40, 0, 8, 16, 48]), np.array([80, 8, 16, 32, 88])
    assert copy._runs(starts, ends, 8) == [(0, 8, 16), (16, 32, 8), (40, 80, 16)]


def test_a_move_within_one_memory() -> None:
    whole = memory(100)
    before = whole.clone()
    copy_blocks(whole, whole, [0, 20], [50, 80], 10)
    assert torch.equal(whole[50:60], before[0:10])
    assert torch.equal(whole[80:90], before[20:30])
    assert torch.equal(whole[:50], before[:50])


def test_nothing_to_copy() -> None:
    source = memory(10)
    before = source.clone()
    copy_blocks(source, source, [], [], 4)
    assert torch.equal(source, before)


@pytest.mark.parametrize(
    ("starts", "ends", "message"),
    [
        ([0, 93], [0, 20], r"source_offsets hold 93; 8 bytes from there are outside the source's 100 bytes"),
        ([0, -1], [0, 20], r"source_offsets hold -1"),
        ([0], [193], r"destination_offsets hold 193; 8 bytes from there are outside the destination's 200 bytes"),
        ([0, 8], [16], r"there are 2 source offsets and 1 destination offsets"),
        ([0, 8], [16, 20], r"destination_offsets 16 and 20 overlap, at 8 bytes a block"),
        ([0, 8], [16, 16], r"destination_offsets 16 and 16 overlap"),
        ([0.5], [16], r"source_offsets have the shape \[1\] of float64"),
    ],
)
def test_offsets_that_do_not_fit(starts: list[int], ends: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        copy_blocks(memory(100), memory(200), starts, ends, 8)


def test_a_block_that_is_read_after_it_was_written() -> None:
    """Also through two tensors that are parts of one memory."""
    whole = memory(100)
    with pytest.raises(ConfigError, match="the block at source offset 20 overlaps one that is written"):
        copy_blocks(whole, whole, [0, 20], [24, 60], 8)
    with pytest.raises(ConfigError, match="the block at source offset 0 overlaps one that is written"):
        copy_blocks(whole[10:], whole, [0], [16], 8)
    copy_blocks(whole[10:], whole, [0], [18], 8)


def test_memories_that_do_not_fit() -> None:
    for source, message in (
        (torch.zeros(100), "source is float32; it must be uint8"),
        (memory(100)[::2], "source has the strides"),
        (memory(100).view(10, 10), r"source has the shape \[10, 10\]; it must be \[bytes\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            copy_blocks(source, memory(100), [0], [0], 8)
    with pytest.raises(ConfigError, match="num_bytes is 0"):
        copy_blocks(memory(10), memory(10), [0], [0], 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_device_and_pinned_host_on_a_stream() -> None:
    host, device = memory(1000).pin_memory(), torch.zeros(2000, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    done = copy_blocks(host, device, [0, 100, 300], [500, 600, 1000], 100, stream=stream)
    assert done is not None
    done.synchronize()
    assert torch.equal(device[500:700].cpu(), host[:200])
    back = torch.zeros(100, dtype=torch.uint8).pin_memory()
    done = copy_blocks(device, back, [1000], [0], 100)
    assert done is not None
    done.synchronize()
    assert torch.equal(back, host[300:400])
