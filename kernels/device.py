"""What the machine is, as far as choosing a kernel goes: the CPU, or a GPU's compute capability. Needs torch."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class Machine(NamedTuple):
    """A device: `kind` is "cpu", "cuda" (NVIDIA), or torch's name of another type; `capability` is (0, 0) off CUDA."""

    kind: str
    capability: tuple[int, int] = (0, 0)

    def is_a(self, architecture: str) -> bool:
        """Whether this is "cpu", "9.0" (that compute capability), "10.x" (its family), or "8.0+" (it or a later)."""
        if architecture == "cpu" or self.kind != "cuda":
            return self.kind == architecture
        major, minor = architecture.rstrip("+").split(".")
        if minor == "x":
            return self.capability[0] == int(major)
        wanted = (int(major), int(minor))
        return self.capability >= wanted if architecture.endswith("+") else self.capability == wanted

    def __str__(self) -> str:
        if self.kind == "cuda":
            return f"compute capability {self.capability[0]}.{self.capability[1]}"
        return f"the {self.kind.upper()}"


@lru_cache(maxsize=64)
def machine_of(device: torch.device) -> Machine:
    """The machine behind a device. AMD's GPUs, which torch also calls "cuda", are "hip" here."""
    if device.type != "cuda":
        return Machine(device.type)
    if torch.version.cuda is None:
        return Machine("hip")
    return Machine("cuda", torch.cuda.get_device_capability(device))


def this_machine() -> torch.device:
    """The device that kernels run on here: the current GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@lru_cache(maxsize=64)
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
