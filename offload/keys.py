"""Store keys: what a stored value is, so exactly that two different things never share a key.

    StoreKey (32 bytes) = space digest (16 bytes) | chain hash (16 bytes)

The chain hash covers the tokens from the sequence's start to the end of the block, with salt, adapter and multimodal
items (`kvtide.hma.hashing`). The space covers everything else: model and revision, element format, the layers and the
KV heads that the value holds, and how many tokens. Heads are named as a part of all heads, not by rank, so that what 4
ranks wrote, 2 ranks can read as two values a block; an MLA latent or anything else that every rank holds alike is
`REPLICATED` and stored once.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from kvtide.kvcache import ConfigError

SPACE_BYTES = 16
CHAIN_BYTES = 16
KEY_BYTES = SPACE_BYTES + CHAIN_BYTES

StoreKey = bytes


@dataclass(frozen=True)
class HeadPart:
    """Part `index` of all KV heads cut into `count` equal parts."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConfigError(f"head part {self.index} of {self.count} must be from 0 to {self.count - 1}")

    def finer(self, factor: int) -> list[HeadPart]:
        """The parts of a cut `factor` times finer that make up this one, in head order."""
        return [HeadPart(self.index * factor + i, self.count * factor) for i in range(factor)]


REPLICATED = HeadPart(0, 1)


@dataclass(frozen=True, kw_only=True)
class ValueSpace:
    """All values of one kind: one model, one group's layers, one part of its heads, one block size.

    `model` and `revision` name the weights; `layer_spec` is the repr of the group's unsharded layer spec, which holds
    dims, dtype and window; `layers` are the layers' numbers in the model, in the value's memory order; `block_tokens`
    is the tokens of a value, 0 for a recurrent state; `hash_key` separates deployments that must not share.
    """

    model: str
    revision: str
    layer_spec: str
    layers: tuple[int, ...]
    heads: HeadPart
    block_tokens: int
    hash_key: bytes = b""

    def digest(self) -> bytes:
        """The 16 bytes that every key of this space begins with."""
        digest = blake2b(digest_size=SPACE_BYTES, person=b"kvtide-space")
        for part in (
            self.model,
            self.revision,
            self.layer_spec,
            ",".join(map(str, self.layers)),
            f"{self.heads.index}/{self.heads.count}",
            str(self.block_tokens),
        ):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        digest.update(self.hash_key)
        return digest.digest()


def store_key(space: bytes, chain: bytes) -> StoreKey:
    """The key of the block whose tokens end where `chain` ends."""
    if len(space) != SPACE_BYTES or len(chain) != CHAIN_BYTES:
        raise ConfigError(
            f"a store key is {SPACE_BYTES} bytes of space and {CHAIN_BYTES} of chain, not {len(space)} and {len(chain)}"
        )
    return space + chain
