"""Element types and packed token formats of KV caches, under the names that serving engines use for them.

`bytes_of` answers for plain element types; the packed formats exist only for MLA latents, where one token is a fixed
run of bytes that mixes types (`packed_latent_bytes`).
"""

from __future__ import annotations

from .errors import ConfigError

ELEMENT_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
PACKED_LATENT_FORMATS = ("fp8_ds_mla", "nvfp4_ds_mla")

_ALIASES = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3",
    "fp8_e4m3": "float8_e4m3",
    "fp8_e5m2": "float8_e5m2",
    "float8_e4m3fn": "float8_e4m3",
}


def canonical_dtype(name: str) -> str:
    """The canonical name of a KV element type or packed format; `ConfigError` lists what is allowed."""
    key = name.lower().removeprefix("torch.")
    key = _ALIASES.get(key, key)
    if key not in ELEMENT_BYTES and key not in PACKED_LATENT_FORMATS:
        allowed = ", ".join([*ELEMENT_BYTES, *_ALIASES, *PACKED_LATENT_FORMATS])
        raise ConfigError(f"KV cache dtype {name!r} is not known; allowed: {allowed}")
    return key


def bytes_of(dtype: str) -> int:
    """Bytes of one element of a canonical, not packed, element type."""
    try:
        return ELEMENT_BYTES[dtype]
    except KeyError:
        what = "a packed MLA token format" if dtype in PACKED_LATENT_FORMATS else "not known"
        raise ConfigError(f"element type {dtype!r} is {what}; allowed: {', '.join(ELEMENT_BYTES)}") from None


def packed_latent_bytes(dtype: str, kv_lora_rank: int, rope_dim: int) -> int:
    """Bytes of one packed MLA token.

    `fp8_ds_mla`: e4m3 latent, one float32 scale per 128 values, bfloat16 rope part (512 + 64 gives 656 bytes).
    `nvfp4_ds_mla`: 4-bit latent, one e4m3 scale per 16 values, one-byte rope part (512 + 64 gives 352 bytes).
    """
    group = 128 if dtype == "fp8_ds_mla" else 16
    if kv_lora_rank % group:
        raise ConfigError(
            f"{dtype} scales groups of {group} latent values; kv_lora_rank {kv_lora_rank} does not divide"
        )
    if dtype == "fp8_ds_mla":
        return kv_lora_rank + 4 * (kv_lora_rank // group) + 2 * rope_dim
    return kv_lora_rank // 2 + kv_lora_rank // group + rope_dim
