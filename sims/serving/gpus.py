"""What a GPU can do at best: memory, bandwidth, dense tensor FLOP/s, and the link to its peers, per device.

Figures are the makers' data sheets (dense rates, without sparsity; FP32 accumulation). `link` is bytes per second that
one GPU can send to its peers, one direction: NVLink or Infinity Fabric where the model has it, else PCIe x16.
`host_link` is its PCIe x16 link to the host, one direction: 32 GB/s for generation 4, 64 GB/s for generation 5.
"""

from __future__ import annotations

from typing import NamedTuple

from kvtide.kvcache import ConfigError

GIB = 2**30


class GpuSpec(NamedTuple):
    """One device. Memory in bytes, rates per second; `flops16` is bf16, `flops8` fp8 (0 where there is none)."""

    name: str
    memory: int
    bandwidth: float
    flops16: float
    flops8: float
    link: float
    host_link: float
    sheet: str


GPUS = {
    spec.name: spec
    for spec in (
        GpuSpec("h200", 141_000_000_000, 4.8e12, 989e12, 1979e12, 450e9, 64e9, "NVIDIA H200 SXM data sheet"),
        GpuSpec("h100", 80 * GIB, 3.35e12, 989e12, 1979e12, 450e9, 64e9, "NVIDIA H100 SXM data sheet"),
        GpuSpec("h20", 96 * GIB, 4.0e12, 148e12, 296e12, 450e9, 64e9, "NVIDIA H20 data sheet"),
        GpuSpec("b200", 180 * GIB, 7.7e12, 2250e12, 4500e12, 900e9, 64e9, "NVIDIA DGX B200 data sheet, per GPU"),
        GpuSpec("a100", 80 * GIB, 2.039e12, 312e12, 0, 300e9, 32e9, "NVIDIA A100 80GB SXM data sheet"),
        GpuSpec("a100-40g", 40 * GIB, 1.555e12, 312e12, 0, 300e9, 32e9, "NVIDIA A100 40GB SXM data sheet"),
        GpuSpec("l40s", 48 * GIB, 864e9, 362e12, 733e12, 32e9, 32e9, "NVIDIA L40S data sheet"),
        GpuSpec("l4", 24 * GIB, 300e9, 121e12, 242e12, 32e9, 32e9, "NVIDIA L4 data sheet"),
        GpuSpec(
            "rtx-pro-6000", 96 * GIB, 1.792e12, 503e12, 1007e12, 64e9, 64e9, "NVIDIA RTX PRO 6000 Blackwell data sheet"
        ),
        GpuSpec("mi300x", 192 * GIB, 5.3e12, 1307e12, 2615e12, 448e9, 64e9, "AMD Instinct MI300X data sheet"),
    )
}


def gpu_of(text: str) -> tuple[GpuSpec, int]:
    """The device and count that `h200` or `h200:4` names; `ConfigError` lists the devices."""
    name, colon, count = text.strip().lower().partition(":")
    if name not in GPUS:
        raise ConfigError(f"GPU {text[:40]!r} is not known; allowed: {', '.join(GPUS)}, each with :N for several")
    if colon and not (count.isascii() and count.isdigit() and 1 <= int(count) <= 1024):
        raise ConfigError(f"GPU {text[:40]!r}: the count behind the colon must be from 1 to 1024")
    return GPUS[name], int(count) if colon else 1
