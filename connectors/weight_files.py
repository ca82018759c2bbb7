"""What names weights that lie in a local directory.

A directory's name says nothing (a new checkpoint is often written over the old one), so the files themselves are
sampled: a few kilobytes at sixteen places of each.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_SAMPLES = 16
_SAMPLE_BYTES = 4096


def sample_files(directory: Path) -> str:
    """A digest of the names, lengths and samples of the weight files in a directory."""
    digest = blake2b(digest_size=16)
    for path in sorted({path for pattern in _WEIGHTS for path in directory.glob(pattern)}):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for at in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * at // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
