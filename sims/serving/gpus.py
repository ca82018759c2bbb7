"""What a GPU can do at best: memory, bandwidth, dense tensor FLOP/s, and the link to its peers, per device.

Rates are the makers' data sheets (dense, without sparsity; FP32 accumulation), and what others quote of them agrees.
Memory is what the driver reports, which is what an engine can use: below the sheet's where ECC takes some (L40S, L4),
above it where the sheet counts decimal gigabytes (H200). It is from published output of nvidia-smi for H200, B200, H20,
L40S, L4 and RTX PRO 6000; for H100 and A100 none was found, and the MI300X's is its sheet's. `link` is bytes per second
that one GPU can send to its peers, one direction: NVLink or Infinity Fabric where the model has it, else PCIe x16.
`host_link` is its PCIe x16 link to the host, one direction: 32 GB/s for generation 4, 64 GB/s for generation 5.
"""

from __future__ import annotations

from typing import NamedTuple

from kvtide.kvcache import ConfigError

MIB, GIB = 2**20, 2**30


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


# Each line was compared with public figures: those of the sheet named; for the A100 also the Ampere white paper
# (300 + 300 GB/s of NVLink, 32 + 32 GB/s of PCIe), for the B200 the HGX figures (8 TB/s, 2,250 and 4,500 dense TFLOP/s,
# 900 GB/s of NVLink each way), for the MI300X the CDNA 3 white paper (seven Infinity Fabric links of 64 GB/s each way).
# The memory of all but the MI300X is the total in published outputs of nvidia-smi, in MiB.
GPUS = {
    spec.name: spec
    for spec in (
        GpuSpec("h200", 143_771 * MIB, 4.8e12, 989e12, 1979e12, 450e9, 64e9, "NVIDIA H200 SXM data sheet"),
        GpuSpec("h100", 81_559 * MIB, 3.35e12, 989e12, 1979e12, 450e9, 64e9, "NVIDIA H100 SXM data sheet"),
        GpuSpec("h20", 97_871 * MIB, 4.0e12, 148e12, 296e12, 450e9, 64e9, "NVIDIA H20 data sheet"),
        GpuSpec("b200", 183_359 * MIB, 8.0e12, 2250e12, 4500e12, 900e9, 64e9, "NVIDIA DGX B200 data sheet, per GPU"),
        GpuSpec("a100", 81_920 * MIB, 2.039e12, 312e12, 0, 300e9, 32e9, "NVIDIA A100 80GB SXM data sheet"),
        GpuSpec("a100-40g", 40_960 * MIB, 1.555e12, 312e12, 0, 300e9, 32e9, "NVIDIA A100 40GB SXM data sheet"),
        GpuSpec("l40s", 46_068 * MIB, 864e9, 362e12, 733e12, 32e9, 32e9, "NVIDIA L40S data sheet"),
        GpuSpec("l4", 23_034 * MIB, 300e9, 121e12, 242e12, 32e9, 32e9, "NVIDIA L4 data sheet"),
        GpuSpec(
            "rtx-pro-6000", 97_887 * MIB, 1.792e12, 503.8e12, 1007.6e12, 64e9, 64e9, "NVIDIA RTX PRO 6000 data sheet"
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
