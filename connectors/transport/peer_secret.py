"""How a reader and a `PeerServer` prove to each other that they have one secret, without sending it.

    reader  Hello(nonce R)                       ─►
                                                 ◄─  Answer(nonce S)                     no share, no metadata yet
    reader  Hello(nonce R, proof "reader" S R)   ─►
                                                 ◄─  Answer(metadata, proof "server" S R)

A proof is HMAC-SHA256 under the secret. What follows is not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Literal

_NONCE_BYTES = 32


def make_nonce() -> bytes:
    """Bytes that were never used before."""
    return secrets.token_bytes(_NONCE_BYTES)


def make_proof(secret: str, who: Literal["reader", "server"], server_nonce: bytes, reader_nonce: bytes) -> bytes:
    """What only one who has the secret can say to these two nonces."""
    return hmac.digest(secret.encode(), who.encode() + server_nonce + reader_nonce, "sha256")


def is_proof(
    proof: bytes, secret: str, who: Literal["reader", "server"], server_nonce: bytes, reader_nonce: bytes
) -> bool:
    """Whether the other side has the secret; nonces of another length prove nothing."""
    if len(server_nonce) != _NONCE_BYTES or len(reader_nonce) != _NONCE_BYTES:
        return False
    return hmac.compare_digest(proof, make_proof(secret, who, server_nonce, reader_nonce))
