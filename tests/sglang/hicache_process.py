"""SGLang's own cache controllers and host pools on a CPU, driven by lines of JSON; run by the Python that has SGLang.

    {"do": "open", "name": "a", "pool": {...}, "rank": {...}, "extra": {...}}   a controller, as a scheduler makes one;
                                                               with "server", under such server arguments of SGLang
    {"do": "write", "name": "a", "tokens": [...], "data": 1}   pages of data go to storage; answers tokens written
    {"do": "fetch", "name": "a", "tokens": [...], "data": 1}   hit, loaded and sound tokens, and pages of other pools
    {"do": "clear" | "counts" | "stats" | "close", "name": "a"}

What the scheduler does between the controller's queues is done here; threads, queues, hashes, pools and the dynamic
loading of the backend are SGLang's. A page's bytes follow from `data`, its pool and its hash, and are put in and taken
out by the pools' own indexing, not by addresses. Devices do not take part. Answers go to the file descriptor that the
first argument names, so that whatever SGLang prints is in nobody's way.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
import time
from array import array
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost, get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context, get_parallel

base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # pools here are small
WAIT_S = 60.0
LAYERS, HEADS, DIM, SLOTS = 3, 4, 8, 512


class DevicePool:
    """What a controller asks of a device pool before any transfer."""

    device = "cpu"
    layer_num = LAYERS

    def register_layer_transfer_counter(self, counter: Any) -> None:
        pass


class LatentDevicePool(DevicePool, MLATokenToKVPool):
    """The same of an MLA model; its class is how SGLang knows one."""

    def __init__(self) -> None:
        pass


def mha_pool(layout: str, dtype: torch.dtype, page: int, heads: int, v_dim: int = DIM) -> MHATokenToKVPoolHost:
    k = tuple(torch.zeros(SLOTS, heads, DIM, dtype=dtype) for _ in range(LAYERS))
    v = tuple(torch.zeros(SLOTS, heads, v_dim, dtype=dtype) for _ in range(LAYERS))
    pointers = [torch.tensor([t.data_ptr() for t in side], dtype=torch.uint64) for side in (k, v)]
    info = MHABufferInfo(
        buffers=KVBuffers(k=k, v=v, k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD),
        page_size=page,
        head_num=heads,
        head_dim=DIM,
        v_head_dim=v_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return get_mha_host_pool_cls(info)(
        info, 1.0, 0, page, layout, pin_memory=False, device_capacity_tokens=SLOTS, start_layer=0, end_layer=LAYERS
    )


def mla_pool(layout: str, dtype: torch.dtype, page: int) -> MLATokenToKVPoolHost:
    width = 3 * DIM
    buffers = tuple(torch.zeros(SLOTS, 1, width, dtype=dtype) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=torch.tensor([t.data_ptr() for t in buffers], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=page,
        kv_lora_rank=2 * DIM,
        qk_rope_head_dim=DIM,
        kv_cache_dim=width,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(
        info,
        1.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=SLOTS,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )


def mamba_pool(layout: str) -> MambaPoolHost:
    temporal, conv = torch.zeros(LAYERS, 16, 2, DIM), (torch.zeros(LAYERS, 16, 3, DIM, dtype=torch.bfloat16),)
    return MambaPoolHost(
        MambaStateBufferInfo(temporal=temporal, conv=conv), 2.0, 0, device_capacity=16, pin_memory=False, layout=layout
    )


class Opened:
    """One scheduler process's part: pools, a controller, a storage backend."""

    def __init__(
        self,
        pool: dict[str, Any],
        rank: dict[str, int],
        extra: dict[str, Any],
        model: str,
        server: dict[str, Any] | None,
    ) -> None:
        self.page = int(pool.get("page", 4))
        self.window = int(pool.get("window", 0))  # pages of a sliding window
        self.has_state = bool(pool.get("state", False))
        self.rank = int(rank.get("tp_rank", 0))
        self.is_latent = pool["kind"] == "mla"
        layout, dtype = str(pool["layout"]), getattr(torch, str(pool.get("dtype", "float32")))
        heads = HEADS // int(rank.get("tp_size", 1))
        if self.is_latent:
            kv: Any = mla_pool(layout, dtype, self.page)
        else:
            kv = mha_pool(layout, dtype, self.page, heads, int(pool.get("v_dim", DIM)))
        device = LatentDevicePool() if self.is_latent else DevicePool()
        entries = [PoolEntry(PoolName.KV, kv, device, lambda layer: layer, is_primary_index_anchor=True)]
        if self.window:
            swa = mha_pool(layout, dtype, self.page, heads)
            entries.append(PoolEntry(PoolName.SWA, swa, device, lambda layer: layer))
        if self.has_state:
            entries.append(PoolEntry(PoolName.MAMBA, mamba_pool(layout), device, lambda layer: layer))
        self.pools = {entry.name: entry.host_pool for entry in entries}
        self.group = HostPoolGroup(entries)
        parallel = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
        self.stack = ExitStack()
        if server is not None:
            self.stack.enter_context(get_context().override_server_args(**server))
        self.stack.enter_context(get_parallel().override(**(parallel | rank)))
        allocator = SimpleNamespace(get_kvcache=lambda: device)
        parsed, threshold, *_ = HybridCacheController.parse_storage_backend_extra_config(json.dumps(extra))
        self.controller = HybridCacheController(
            allocator,
            self.group,
            self.page,
            dist.group.WORLD,
            threading.Event(),
            io_backend="direct",
            storage_backend="dynamic",
            prefetch_threshold=threshold,
            model_name=model,
            storage_backend_extra_config=parsed,
            enable_storage_metrics=True,
        )
        self.backend: Any = self.controller.storage_backend

    def write(self, key: RadixKey, data: int) -> dict[str, Any]:
        hashes = self.hashes(key)
        indices = self.filled(PoolName.KV, hashes, data)
        extra = []
        for name, tail in self.tails(hashes):
            transfer = self.transfer(name, tail)
            transfer.host_indices = self.filled(name, tail, data)
            extra.append(transfer)
        self.controller.write_storage(indices, key, hash_value=hashes, extra_pools=extra or None)
        operation = self.controller.ack_backup_queue.get(timeout=WAIT_S)
        self.free(PoolName.KV, indices)
        for transfer in extra:
            self.free(transfer.name, transfer.host_indices)
        return {"written": operation.completed_tokens}

    def fetch(self, key: RadixKey, data: int, slow: float) -> dict[str, Any]:
        hashes = self.hashes(key)
        extra = []
        for name, tail in self.tails(hashes):
            transfer = self.transfer(name, tail)
            transfer.host_indices = self.blank(name, len(tail))
            extra.append(transfer)
        start = time.monotonic()
        handle = CacheRequestHandle("request", 0)
        operation = self.controller.prefetch(handle, key, extra_pools=extra or None)
        self.controller.prefetch_hit_queue.get(timeout=WAIT_S)
        hit = operation.storage_hit_count
        answer: dict[str, Any] = {"hit": hit, "loaded": 0, "sound": 0, "pools": {}}
        if hit:
            time.sleep(slow)
            operation.host_indices = self.blank(PoolName.KV, hit // self.page)
            self.controller.prefetch_buffer.put(operation)
            while True:
                ack = self.controller.ack_prefetch_queue.get(timeout=WAIT_S)
                if ack.completed_tokens is not None:
                    answer["loaded"] = ack.completed_tokens
                if ack.pool_hits is not None:
                    answer["pools"] = {str(name): pages for name, pages in ack.pool_hits.items()}
                if ack.completed_req:
                    break
            loaded = hashes[: answer["loaded"] // self.page]
            answer["sound"] = self.page * self.sound(PoolName.KV, loaded, operation.host_indices, data)
            answer["sound_pools"] = {
                str(t.name): self.sound(t.name, t.keys[: answer["pools"].get(str(t.name), 0)], t.host_indices, data)
                for t in extra
            }
            self.free(PoolName.KV, operation.host_indices)
        answer["seconds"] = time.monotonic() - start
        for transfer in extra:
            self.free(transfer.name, transfer.host_indices)
        return answer

    def hashes(self, key: RadixKey) -> list[str]:
        return list(get_storage_hash_str(key, None, page_size=self.page))

    def tails(self, hashes: list[str]) -> list[tuple[PoolName, list[str]]]:
        tails = [(PoolName.SWA, hashes[-self.window :])] if self.window else []
        return tails + ([(PoolName.MAMBA, hashes[-1:])] if self.has_state else [])

    def transfer(self, name: PoolName, keys: list[str]) -> PoolTransfer:
        return PoolTransfer(name=name, keys=list(keys), hit_policy=PoolHitPolicy.TRAILING_PAGES)

    def blank(self, name: PoolName, pages: int) -> torch.Tensor:
        pool = self.pools[name]
        indices = pool.alloc(pages * pool.page_size)
        assert indices is not None
        return indices

    def filled(self, name: PoolName, hashes: list[str], data: int) -> torch.Tensor:
        indices, pool = self.blank(name, len(hashes)), self.pools[name]
        for index, page in zip(indices[:: pool.page_size].tolist(), hashes, strict=True):
            put_page(pool, index, self.content(name, page, data))
        return indices

    def sound(self, name: PoolName, hashes: list[str], indices: torch.Tensor, data: int) -> int:
        """How many pages hold what they should."""
        pool = self.pools[name]
        return sum(
            bool(torch.equal(take_page(pool, index), self.content(name, page, data)))
            for index, page in zip(indices[:: pool.page_size].tolist(), hashes, strict=False)
        )

    def content(self, name: PoolName, page: str, data: int) -> torch.Tensor:
        who = 0 if self.is_latent and name != PoolName.MAMBA else self.rank
        seed = hashlib.sha256(f"{name} {page} {data} {who}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "little", signed=True))
        num_bytes = take_page(self.pools[name], 0).numel()
        return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)

    def free(self, name: PoolName, indices: torch.Tensor) -> None:
        self.pools[name].free(indices)


def take_page(pool: Any, index: int) -> torch.Tensor:
    """A page's bytes, K before V."""
    if isinstance(pool.kv_buffer, tuple) and not isinstance(pool, MambaPoolHost):  # K and V of unequal widths
        page = index // pool.page_size
        at = slice(page, page + 1) if pool.layout == "page_first_direct" else slice(index, index + pool.page_size)
        return torch.cat([side[at].flatten().view(torch.uint8) for side in pool.kv_buffer])
    return pool.get_data_page(index, flat=True).contiguous().view(torch.uint8).flatten().clone()


def put_page(pool: Any, index: int, content: torch.Tensor) -> None:
    if isinstance(pool.kv_buffer, tuple) and not isinstance(pool, MambaPoolHost):
        page, start = index // pool.page_size, 0
        at = slice(page, page + 1) if pool.layout == "page_first_direct" else slice(index, index + pool.page_size)
        for side in pool.kv_buffer:
            num_bytes = side[at].numel() * side.element_size()
            side[at] = content[start : start + num_bytes].view(side.dtype).view(side[at].shape)
            start += num_bytes
    else:
        like = pool.get_dummy_flat_data_page()
        pool.set_from_flat_data_page(index, content.view(like.dtype))


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    out = os.fdopen(int(sys.argv[1]), "w")
    opened: dict[str, Opened] = {}
    for line in sys.stdin:
        command = json.loads(line)
        do, name = command.pop("do"), command.pop("name", "")
        answer: dict[str, Any] = {}
        if do == "failures":
            envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.set(command["probability"])
        elif do == "open":
            try:
                opened[name] = Opened(
                    command["pool"], command["rank"], command["extra"], command["model"], command["server"]
                )
            except Exception as error:
                answer["error"] = f"{type(error).__name__}: {error}"
        elif do in ("write", "fetch"):
            one = opened[name]
            key = RadixKey(array("q", command["tokens"]), cache_salt=command.get("salt"))
            data = command["data"]
            answer = one.write(key, data) if do == "write" else one.fetch(key, data, command.get("slow", 0.0))
        elif do == "close":
            one = opened.pop(name)
            one.controller.detach_storage_backend()
            one.stack.close()
        elif do == "clear":
            answer["cleared"] = opened[name].controller.clear_storage_backend()
        elif do == "stats":
            stats = opened[name].backend.get_stats()
            answer["prefetched"], answer["backed_up"] = stats.prefetch_pgs, stats.backup_pgs
            import prometheus_client

            answer["metrics"] = prometheus_client.generate_latest().decode()
        if name in opened and hasattr(opened[name].backend, "counts"):
            answer["counts"] = dict(opened[name].backend.counts)
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
