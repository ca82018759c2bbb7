"""The up-projections of MLA, and the two ways to use them: fold them into the query, or decompress the latents.

score of a head    q_nope . (w_uk latent) + q_rope . rope    =    (q_nope w_uk) . latent + q_rope . rope
value of a head    sum p * (latent w_uv)                     =    (sum p * latent) w_uv
                   decompressed                                   absorbed
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtide.kvcache import ConfigError

from .arguments import QUERY_DTYPES, check_tensor


@dataclass(frozen=True, eq=False)
class UpProjections:
    """`w_uk` [heads, nope_dim, latent_dim] and `w_uv` [heads, latent_dim, value_dim] of one layer, of one dtype.

    In DeepSeek's weights these are the two parts of `kv_b_proj`. `ConfigError` when the shapes do not fit together.
    """

    w_uk: torch.Tensor
    w_uv: torch.Tensor

    def __post_init__(self) -> None:
        w_uk = check_tensor("w_uk", self.w_uk, ("heads", "nope_dim", "latent_dim"), QUERY_DTYPES, None)
        heads, _, latent_dim = w_uk.shape
        if 0 in w_uk.shape:
            raise ConfigError(f"w_uk has the shape {list(w_uk.shape)}; every dimension must be at least 1")
        check_tensor("w_uv", self.w_uv, (heads, latent_dim, "value_dim"), (w_uk.dtype,), w_uk.device)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.w_uk.shape[0]

    @property
    def nope_dim(self) -> int:
        """Query values of a head that meet the latent, and not the rotary part."""
        return self.w_uk.shape[1]

    @property
    def latent_dim(self) -> int:
        """Latent values of a token."""
        return self.w_uk.shape[2]

    @property
    def value_dim(self) -> int:
        """Output values of a head."""
        return self.w_uv.shape[2]

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """`[..., heads, nope_dim + rope_dim]` to `[..., heads, latent_dim + rope_dim]`, in the latent's space."""
        nope, rope = torch.split(query, [self.nope_dim, query.shape[-1] - self.nope_dim], dim=-1)
        return torch.cat((torch.einsum("...hn,hnl->...hl", nope, self.w_uk), rope), dim=-1)

    def to_values(self, out: torch.Tensor) -> torch.Tensor:
        """An absorbed output `[..., heads, latent_dim]` to `[..., heads, value_dim]`."""
        return torch.einsum("...hl,hlv->...hv", out, self.w_uv)

    def decompress(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[heads, n, nope_dim + rope_dim]` and values `[heads, n, value_dim]` of `n` latents and their ropes."""
        latent, rope = torch.split(latents, [self.latent_dim, latents.shape[-1] - self.latent_dim], dim=-1)
        nope = torch.matmul(latent, self.w_uk.transpose(1, 2))
        keys = torch.cat((nope, rope.expand(self.heads, *rope.shape)), dim=-1)
        return keys, torch.matmul(latent, self.w_uv)

    @property
    def absorbed_below(self) -> float:
        """New tokens of a request from which decompressing a key costs less than what it saves (170.7 for DeepSeek).

        A multiply-add a head: decompressing takes latent_dim * (nope_dim + value_dim) a key; absorbed attention takes
        2 * latent_dim where the other takes nope_dim + value_dim, for every pair of a query and a key.
        """
        decompressed = self.nope_dim + self.value_dim
        saved = 2 * self.latent_dim - decompressed
        return self.latent_dim * decompressed / saved if saved > 0 else float("inf")
