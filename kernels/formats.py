"""How MLA latents lie in the cache, token by token: one entry of `LatentFormat` per token layout.

    FLOAT32, FLOAT16, BFLOAT16   | latent_dim values | rope_dim values |                 elements of that type
    FP8                          | latent_dim values | rope_dim values |                 e4m3, one scale for the tensor
    FP8_DS (fp8_ds_mla)          | latent_dim e4m3 | latent_dim/128 float32 scales | rope_dim bfloat16 |        bytes

Keys are the whole token, values its latent part: both come from one read. FP8_DS of 512 + 64 takes 656 bytes; its
scales are powers of two, so that a value times its scale is exact in bfloat16. Needs torch.
"""

from __future__ import annotations

from enum import Enum

import torch

from kvtide.kvcache import ConfigError

# Latent values that share one scale in FP8_DS.
SCALE_GROUP = 128
FP8_MAX = 448.0


class LatentFormat(Enum):
    """A token layout of a latent cache; the value is its name in engines' `kv_cache_dtype`."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8_e4m3"
    FP8_DS = "fp8_ds_mla"

    @classmethod
    def of(cls, cache: torch.Tensor, latent_dim: int, rope_dim: int) -> LatentFormat:
        """The format of a cache, from its dtype and elements a token (its last dimension); `ConfigError` if none."""
        for fmt in cls:
            if cache.dtype == fmt.storage_dtype and cache.shape[-1] == fmt.width(latent_dim, rope_dim):
                return fmt
        raise ConfigError(
            f"a latent cache of {cache.dtype} and {cache.shape[-1]} elements a token holds no known format of "
            f"{latent_dim} + {rope_dim} values; allowed are {', '.join(f.value for f in cls)}"
        )

    @property
    def storage_dtype(self) -> torch.dtype:
        """The element type of the cache tensor."""
        return _STORAGE[self]

    def width(self, latent_dim: int, rope_dim: int) -> int:
        """Elements of `storage_dtype` that one token takes."""
        if self is LatentFormat.FP8_DS:
            return latent_dim + 4 * (latent_dim // SCALE_GROUP) + 2 * rope_dim
        return latent_dim + rope_dim

    def token_bytes(self, latent_dim: int, rope_dim: int) -> int:
        """Bytes that one token takes."""
        return self.width(latent_dim, rope_dim) * self.storage_dtype.itemsize


_STORAGE = {
    LatentFormat.FLOAT32: torch.float32,
    LatentFormat.FLOAT16: torch.float16,
    LatentFormat.BFLOAT16: torch.bfloat16,
    LatentFormat.FP8: torch.float8_e4m3fn,
    LatentFormat.FP8_DS: torch.uint8,
}
