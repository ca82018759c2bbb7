"""Compile a kernel launch for a GPU that is not there, and read what the compiler and the assembler made of it.

Compiling can succeed for code that cannot run: shared memory over the limit is refused only when a GPU loads the code,
and a tensor memory need over 512 columns leaves a stub of a few registers. So callers must look at every field.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from kvtide.kernels.triton_kernel import Launch

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """Bytes of shared memory, columns of tensor memory, registers and stack bytes a thread, opcodes with counts."""

    shared: int
    tensor_memory: int
    registers: int
    stack: int
    opcodes: dict[str, int]

    def count(self, *parts: str) -> int:
        """Instructions whose mnemonic has all these parts between its dots."""
        return sum(n for name, n in self.opcodes.items() if {*parts} <= {*name.split(".")})

    def __str__(self) -> str:
        products = {op: n for op in ("HMMA", "HGMMA", "UTCHMMA", "LDGSTS", "FFMA") if (n := self.count(op))}
        memory = f"{self.stack:5d} stack {self.shared:6d} shared {self.tensor_memory:3d} tensor"
        return f"{self.registers:3d} registers {memory} {products}"


def compile_for(launch: Launch, capability: int) -> Compiled:
    """Compile a launch for compute capability 80, 90, 100, ...; its tensors may be on `meta`."""
    kernel = launch.kernel.compiled
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = launch.args[parameter.name]
        aligned = [["tt.divisibility", 16]]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            if value.storage_offset() * value.itemsize % 16 == 0:
                attributes[(place,)] = aligned
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and parameter.name not in launch.kernel.varying:
            signature[parameter.name] = "constexpr"
            constants[(place,)] = 1
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and parameter.name not in launch.kernel.varying:
                attributes[(place,)] = aligned
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options=launch.options,
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        code = _cuobjdump("--dump-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    opcodes: dict[str, int] = {}
    for name in re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9][.\w]*)", code, flags=re.M):
        opcodes[name] = opcodes.get(name, 0) + 1
    return Compiled(
        shared=built.metadata.shared,
        tensor_memory=getattr(built.metadata, "tmem_size", 0) or 0,
        registers=int(found[1]),
        stack=int(found[2]),
        opcodes=opcodes,
    )


def _cuobjdump(*args: str) -> str:
    return subprocess.run([_CUOBJDUMP, *args], check=True, capture_output=True, text=True).stdout
