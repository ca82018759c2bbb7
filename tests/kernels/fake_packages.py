"""Stand-ins for the packages that kvtide adapts: recorded signatures and checks, with the right answer behind them.

Each stand-in has its function's signature as its wheel has it (`SIGNATURES`, read out of the sources of the versions
named there), refuses what the real one refuses, computes in float64, and answers in the real one's conventions: base
and shape of the LSE, and what it leaves where no key is visible (`test_adapters.py` needs no GPU for any of it).
They are stricter than the real ones in one way: a table entry that is out of range is an error wherever it stands.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

# tokenspeed-mla 2.0.4, sgl-flash-mla 1.0.0, FlashMLA at 9241ae3 (upstream), flashinfer-python 0.7.4,
# vllm 0.33.0 (FlashAttention 3 and CUTLASS), flash-attn-4 4.0.0b36.
SIGNATURES = {
    "tokenspeed_mla.tokenspeed_mla_decode": (
        "query, kv_cache, workspace_buffer, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, max_seq_len, "
        "softmax_scale, output_scale=1.0, out=None, is_var_seq=True, causal_mask=True, window_left=-1, "
        "enable_pdl=False, return_lse=False, causal_seqs=None, cp_world=1, cp_rank=0, cp_interleave_size=1, *, "
        "min_split_kv=1, local_visible_lens=None"
    ),
    "flash_mla.flash_mla_with_kvcache": (
        "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, "
        "softmax_scale=None, causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None, extra_k_cache=None, "
        "extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, enable_batch_invariant=False, "
        "use_legacy=False, kv_format=None, descale_q=None, descale_k=None"
    ),
    "flash_mla.flash_mla_with_kvcache (upstream)": (
        "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, "
        "softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None, "
        "extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None"
    ),
    "flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla": (
        "query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, "
        "max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, "
        "skip_softmax_threshold_scale_factor=None, enable_pdl=None, backend='auto', is_var_seq=True, "
        "uses_shared_paged_kv_idx=True, lse=None, return_lse=False, cute_dsl_impl='auto', kv_scale_format='auto', "
        "cum_seq_lens_q=None, max_q_len=None, multi_ctas_kv_counter_buffer=None, sparse_mla_top_k_lens=None, "
        "enable_dcp=False, cp_world=1, cp_rank=0, causal_seqlens_kv_global=None, use_fp16_softmax=None, "
        "return_lse_base=None"
    ),
    "vllm.vllm_flash_attn.flash_attn_interface.flash_attn_varlen_func": (
        "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, "
        "dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, "
        "deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, "
        "scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, num_splits=0, output_scale=None, "
        "fa_version=2, s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, mask_mod=None, "
        "block_sparse_tensors=None, aux_tensors=None, aux_tensor_leading_dims=None, dynamic_causal=None"
    ),
    "flash_attn.cute.interface.flash_attn_varlen_func": (
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
        "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
        "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, "
        "block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, "
        "seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False, "
        "gather_bwd_token_chunk=None"
    ),
    "vllm._custom_ops.sm100_cutlass_mla_decode": (
        "out, lse, q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace, scale, num_kv_splits"
    ),
    "vllm._custom_ops.sm100_cutlass_mla_get_workspace_size": "max_seq_len, num_batches, sm_count, num_kv_splits",
}

HALF = (torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn


def signature(name: str) -> inspect.Signature:
    """A recorded signature."""
    space: dict[str, Any] = {}
    exec(f"def recorded({SIGNATURES[name]}): pass", space)
    return inspect.signature(space["recorded"])


class Package:
    """The stand-ins, installed while the context lasts; `calls` holds the arguments of every call, by name."""

    def __init__(self, *, upstream_flash_mla: bool = False) -> None:
        self.calls: list[dict[str, Any]] = []
        self._workspaces: list[torch.Tensor] = []
        flash_mla = "flash_mla.flash_mla_with_kvcache"
        functions: dict[str, Callable[..., Any]] = {
            "tokenspeed_mla.tokenspeed_mla_decode": self._tokenspeed,
            flash_mla + (" (upstream)" if upstream_flash_mla else ""): self._flash_mla,
            "flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla": self._flashinfer,
            "vllm.vllm_flash_attn.flash_attn_interface.flash_attn_varlen_func": self._flash_attention_3,
            "flash_attn.cute.interface.flash_attn_varlen_func": self._flash_attention_4,
            "vllm._custom_ops.sm100_cutlass_mla_decode": self._cutlass,
            "vllm._custom_ops.sm100_cutlass_mla_get_workspace_size": lambda given: 1000,
        }
        self._modules: dict[str, ModuleType] = {}
        for name, function in functions.items():
            module, _, attribute = name.removesuffix(" (upstream)").rpartition(".")
            setattr(self._module(module), attribute, self._bound(name, function))
        self._module("tokenspeed_mla.mla_decode")
        self._module("flash_mla").get_mla_metadata = lambda: (Schedule(), None)
        if not upstream_flash_mla:
            self._module("flash_mla").has_legacy = lambda: True
        interface = self._module("vllm.vllm_flash_attn.flash_attn_interface")
        interface.FA3_AVAILABLE, interface.FA3_UNAVAILABLE_REASON = True, None

    def _module(self, name: str) -> Any:
        """The module, made with its parents."""
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in self._modules:
                self._modules[path] = ModuleType(path)
                self._modules[path].__spec__ = ModuleSpec(path, None, is_package=True)
        return self._modules[name]

    def _bound(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        recorded = signature(name)

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            given = recorded.bind(*args, **kwargs)
            given.apply_defaults()
            self.calls.append(dict(given.arguments))
            return function(given.arguments)

        stand_in.__signature__ = recorded  # type: ignore[attr-defined]
        return stand_in

    @contextmanager
    def installed(self) -> Iterator[Package]:
        """In `sys.modules`, before whatever was there."""
        before = {name: sys.modules.get(name) for name in self._modules}
        sys.modules.update(self._modules)
        try:
            yield self
        finally:
            for name, module in before.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module

    def _zeroed(self, workspace: torch.Tensor, num_bytes: int) -> None:
        """A workspace is zero when it is first seen, and stays one buffer."""
        assert workspace.is_contiguous()
        assert workspace.numel() * workspace.itemsize >= num_bytes
        assert workspace.data_ptr() % 32 == 0
        if not any(workspace is seen for seen in self._workspaces):
            assert not workspace[::4093].any()
            self._workspaces.append(workspace)

    def _tokenspeed(self, a: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        query, cache = a["query"], a["kv_cache"]
        assert query.dtype in (*HALF, FP8)
        assert cache.dtype == query.dtype
        batch, q_len, heads, width = query.shape
        assert (a["kv_lora_rank"], a["qk_rope_head_dim"], width) == (512, 64, 576)
        assert 1 <= heads <= 128
        assert 128 % cache.shape[1] == 0
        assert cache.shape[1] != 1
        _check_strides(query, cache)
        _check_table(a["block_tables"], a["seq_lens"], batch, cache)
        assert a["max_seq_len"] > 0
        assert type(a["softmax_scale"]) is type(a["output_scale"]) is float
        assert a["window_left"] == -1 or a["window_left"] >= q_len - 1
        assert a["workspace_buffer"].dtype == torch.int8
        self._zeroed(a["workspace_buffer"], batch * heads * q_len * 513 * 4)
        out = a["out"]
        assert out.dtype == (torch.bfloat16 if query.dtype == FP8 else query.dtype)
        assert out.is_contiguous()
        window = None if a["window_left"] < 0 else a["window_left"] + 1
        answer, lse = attention(
            query, cache[..., :512], cache[..., 512:], a["block_tables"], a["seq_lens"], a["softmax_scale"], window
        )
        out.copy_(answer * a["output_scale"])
        empty = lse == -math.inf
        out[empty] = math.nan
        return out, (lse / math.log(2)).masked_fill(empty, 0)

    def _flash_mla(self, a: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        query, cache = a["q"], a["k_cache"]
        assert query.dtype in HALF
        assert cache.dtype == query.dtype
        batch, _, _, width = query.shape
        assert cache.shape[1:] == (64, 1, 576)
        assert width == 576
        assert a["head_dim_v"] == 512
        _check_strides(query, cache)
        _check_table(a["block_table"], a["cache_seqlens"], batch, cache)
        assert a["softmax_scale"] is not None, "the default is 1 / sqrt(576)"
        assert a["causal"]
        assert not a["is_fp8_kvcache"]
        assert a.get("use_legacy", True), "dense decoding is in the legacy extension"
        assert all(a[name] is None for name in ("num_splits", "indices", "attn_sink", "extra_k_cache"))
        a["tile_scheduler_metadata"].use()
        flat = cache[:, :, 0]
        out, lse = attention(
            query, flat[..., :512], flat[..., 512:], a["block_table"], a["cache_seqlens"], a["softmax_scale"]
        )
        lse = lse.masked_fill(lse == -math.inf, math.inf)
        return out.to(query.dtype), lse.transpose(1, 2).contiguous()

    def _flashinfer(self, a: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        query, cache = a["query"], a["kv_cache"]
        assert query.dtype in (torch.bfloat16, FP8)
        assert cache.dtype == query.dtype
        batch, q_len, heads, width = query.shape
        assert query.is_contiguous()
        assert (a["kv_lora_rank"], a["qk_rope_head_dim"], width) == (512, 64, 576)
        assert a["qk_nope_head_dim"] in (64, 128, 192)
        assert heads <= 64 or heads == 128
        assert cache.shape[1] in (32, 64)
        _check_strides(query, cache)
        _check_table(a["block_tables"], a["seq_lens"], batch, cache)
        assert (a["backend"], a["return_lse"], a["return_lse_base"]) == ("trtllm-gen", True, "basee")
        self._zeroed(a["workspace_buffer"], 128 * 2**20)
        out = a["out"]
        assert out.dtype == torch.bfloat16
        assert out.is_contiguous()
        answer, lse = attention(
            query, cache[..., :512], cache[..., 512:], a["block_tables"], a["seq_lens"], a["bmm1_scale"]
        )
        seen = lse > -math.inf
        out[seen] = (answer[seen] * a["bmm2_scale"]).to(out.dtype)
        return out, lse.view(batch * q_len, heads)

    def _flash_attention_3(self, a: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        q, q_v, k, v = a["q"], a["q_v"], a["k"], a["v"]
        assert a["fa_version"] == 3
        assert q.dtype in HALF
        assert q.dtype == q_v.dtype == k.dtype == v.dtype
        batch, tokens = a["seqused_k"].shape[0], q.shape[0]
        q_len = a["max_seqlen_q"]
        assert a["cu_seqlens_q"].dtype == torch.int32
        assert a["cu_seqlens_q"].tolist() == list(range(0, tokens + 1, q_len))
        assert k.shape[1] % 16 == 0
        assert k.shape[2:] == (1, 64)
        assert v.shape[2:] == (1, 512)
        _check_strides(q, k)
        _check_strides(q_v, v)
        _check_table(a["block_table"], a["seqused_k"], batch, v)
        assert a["max_seqlen_k"] == a["block_table"].shape[1] * k.shape[1]
        assert a["softmax_scale"] is not None, "the default is 1 / sqrt(64)"
        assert a["causal"]
        assert a["return_softmax_lse"]
        assert a["cu_seqlens_k"] is None
        assert a["window_size"] is None
        query = torch.cat((q_v, q), dim=-1).view(batch, q_len, q.shape[1], 576)
        answer, lse = attention(query, v[:, :, 0], k[:, :, 0], a["block_table"], a["seqused_k"], a["softmax_scale"])
        a["out"].copy_(answer.view(a["out"].shape))
        return a["out"], lse.permute(2, 0, 1).reshape(q.shape[1], tokens)

    def _flash_attention_4(self, a: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        q, qv, k, v = a["q"], a["qv"], a["k"], a["v"]
        assert q.dtype in HALF
        assert q.dtype == qv.dtype == k.dtype == v.dtype
        assert q.shape[-1] == k.shape[-1] == 64
        assert qv.shape[-1] == v.shape[-1] == 512
        _check_strides(q, k)
        _check_strides(qv, v)
        _check_table(a["page_table"], a["seqused_k"], q.shape[0], v)
        assert a["softmax_scale"] is not None, "the default is 1 / sqrt(576)"
        assert a["causal"]
        assert a["return_lse"]
        assert a["window_size"] == (None, None)
        assert a["scheduler_metadata"] is None
        query = torch.cat((qv, q), dim=-1)
        out, lse = attention(query, v[:, :, 0], k[:, :, 0], a["page_table"], a["seqused_k"], a["softmax_scale"])
        return out.to(q.dtype), lse

    def _cutlass(self, a: dict[str, Any]) -> torch.Tensor:
        nope, rope, cache = a["q_nope"], a["q_pe"], a["kv_c_and_k_pe_cache"]
        assert nope.dtype in HALF
        assert nope.dtype == rope.dtype == cache.dtype
        batch, heads, _ = nope.shape
        assert (nope.shape[2], rope.shape[2], cache.shape[1:]) == (512, 64, (128, 576))
        assert heads <= 128
        assert cache.is_contiguous(), "the kernel takes its strides from the sizes"
        _check_table(a["page_table"], a["seq_lens"], batch, cache)
        assert (a["out"].shape, a["lse"].shape) == ((batch, 128, 512), (batch, 128))
        assert a["lse"].dtype == torch.float32
        assert a["workspace"].dtype == torch.uint8
        self._zeroed(a["workspace"], 1000)
        query = torch.cat((nope, rope), dim=-1)[:, None]
        answer, lse = attention(query, cache[..., :512], cache[..., 512:], a["page_table"], a["seq_lens"], a["scale"])
        a["out"].fill_(math.nan)
        a["out"][:, :heads] = answer[:, 0].to(nope.dtype)
        a["lse"].fill_(math.nan)
        a["lse"][:, :heads] = lse[:, 0]
        return a["out"]


class Schedule:
    """FlashMLA's schedule: valid for one set of lengths, so these tests let no call reuse one."""

    def __init__(self) -> None:
        self._used = False

    def use(self) -> None:
        """Called by the kernel."""
        assert not self._used, "the schedule of other lengths"
        self._used = True


def _check_strides(query: torch.Tensor, cache: torch.Tensor) -> None:
    """What TMA and vector loads ask for."""
    assert query.stride(-1) == cache.stride(-1) == 1
    for tensor in (query, cache):
        strides = [s for s, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
        assert all(stride * tensor.itemsize % 16 == 0 for stride in strides)


def _check_table(table: torch.Tensor, seq_lens: torch.Tensor, batch: int, cache: torch.Tensor) -> None:
    """Types and sizes of a block table and its lengths, and every entry in range, used or not."""
    assert table.dtype == seq_lens.dtype == torch.int32
    assert table.shape[0] == seq_lens.shape[0] == batch
    assert table.is_contiguous()
    assert seq_lens.is_contiguous()
    assert table.shape[1] > 0
    assert seq_lens.min() >= 1
    assert table.min() >= 0
    assert table.max() < cache.shape[0]


def attention(
    query: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention, aligned bottom right, of [batch, q_len, heads, 576] over pages; float64 out and float32 LSE."""
    batch, q_len, heads, _ = query.shape
    page = latent.shape[1]
    out = torch.zeros(batch, q_len, heads, latent.shape[2], dtype=torch.float64)
    lse = torch.full((batch, q_len, heads), -math.inf)
    for row, length in enumerate(seq_lens.tolist()):
        pages = table[row, : -(-length // page)].long()
        values = latent[pages].reshape(-1, latent.shape[2])[:length].double()
        keys = torch.cat((values, rope[pages].reshape(-1, rope.shape[2])[:length].double()), dim=-1)
        for token in range(q_len):
            end = length - q_len + token + 1
            begin = 0 if window is None else max(0, end - window)
            if end > begin:
                scores = scale * (query[row, token].double() @ keys[begin:end].T)
                lse[row, token] = torch.logsumexp(scores, dim=-1)
                out[row, token] = torch.softmax(scores, dim=-1) @ values[begin:end]
    return out, lse
