"""What `kvtide doctor` tries, one probe a process: `python -m kvtide.cli.probes NAME` prints one JSON object.

Each probe runs in a process of its own because it loads other people's native libraries: one that crashes, hangs or
writes to the terminal spoils its own answer and no more. The answer is {"works": bool, "note": text}; where something
does not work, `note` says why not, or what to install.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import Any, NamedTuple

from kvtide.kvcache.errors import ConfigError, KvtideError, MissingExtra

VALUE_BYTES = 1 << 16
KERNEL_BOUND = 0.02  # of bfloat16 results of about 1
_BUCKET = {"bucket": "none", "endpoint_override": "http://127.0.0.1:9", "scheme": "http"}


class Answer(NamedTuple):
    """What a probe found."""

    works: bool
    note: str = ""


def host() -> Answer:
    """Values in host memory."""
    return _round_trip("HostConnector", {"max_bytes": "64MiB"})


def lmdb() -> Answer:
    """LMDB with segment files, in a temporary directory."""
    with _directory() as path:
        return _round_trip("LMDBConnector", {"path": f"{path}/store", "max_bytes": "64MiB"})


def shared_storage() -> Answer:
    """Files of a shared directory; here a temporary one."""
    with _directory() as path:
        return _round_trip("SharedStorageConnector", {"shared_storage_path": f"{path}/store"})


def multi() -> Answer:
    """Two tiers."""
    with _directory() as path:
        tiers = [
            {"kv_connector": "HostConnector", "kv_connector_extra_config": {"max_bytes": "32MiB"}},
            {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": f"{path}/store"}},
        ]
        return _round_trip("MultiConnector", {"connectors": tiers})


def nixl_posix() -> Answer:
    """NIXL's files without a GPU."""
    with _directory() as path:
        return _round_trip("NixlConnector", {"plugin": "POSIX", "path": path})


def nixl_gds() -> Answer:
    """NIXL's GPUDirect Storage."""
    return _plugin("GDS", {})


def nixl_obj() -> Answer:
    """NIXL's object storage."""
    return _plugin("OBJ", _BUCKET)


def nixl_obj_cu12() -> Answer:
    """The same in NIXL's build for CUDA 12, whose plug-in needs no library of CUDA's."""
    return _plugin("OBJ", _BUCKET, "nixl_cu12")


def nixl_peer() -> Answer:
    """NIXL between peers, over UCX."""
    return _plugin("UCX", {})


def redis() -> Answer:
    """The client of Redis and Valkey."""
    return _client("redis", "RedisConnector", "redis")


def s3() -> Answer:
    """The client of S3."""
    return _client("boto3", "S3Connector", "s3")


def mooncake() -> Answer:
    """The client of Mooncake Store, and the native libraries that it needs."""
    from kvtide.connectors.config import make_store

    address = "127.0.0.1:9"  # nobody's; the library is loaded before the master is looked for
    try:
        make_store("MooncakeConnector", {"master_server_address": address, "timeout_seconds": 1}).close()
    except ConfigError as error:
        if address not in str(error):
            raise
    return Answer(True, "the client loads; a master is needed: kvtide config check --open CONFIG")


def codec(name: str) -> Answer:
    """One codec, there and back."""
    from kvtide.offload.codecs import codec_named

    found = codec_named(name)
    if found is None:
        raise ConfigError(f"codec {name} packs nothing")
    raw = memoryview(bytes(range(256)) * 64)
    out = memoryview(bytearray(raw.nbytes))
    packed = found.encode(raw)
    if packed is None:
        return Answer(False, "it refuses a plain value")
    found.decode(packed, out)
    return Answer(True) if out == raw else Answer(False, "a value comes back changed")


def zstd() -> Answer:
    """The zstd codec."""
    return codec("zstd")


def lz4() -> Answer:
    """The lz4 codec."""
    return codec("lz4")


def gpu() -> Answer:
    """A GPU that torch can use."""
    torch = _torch("kernels")
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        total = device.total_memory / 2**30
        return Answer(True, f"{device.name}, compute capability {device.major}.{device.minor}, {total:.0f} GiB")
    if torch.version.cuda is None and torch.version.hip is None:
        return Answer(False, f"torch {torch.__version__} is built without CUDA")
    return Answer(False, "torch finds no GPU; see nvidia-smi")


def kernels() -> dict[str, Answer]:
    """Every MLA backend: its reasons against a plain decode call here, or a small call that it really computes."""
    torch = _torch("kvtide.kernels")
    from kvtide.kernels import mla_decode, registry
    from kvtide.kernels.device import machine_of, this_machine
    from kvtide.kernels.formats import LatentFormat
    from kvtide.kernels.support import Request

    device = this_machine()
    batch, heads, block, width, blocks = 2, 16, 64, 576, 4
    token_bytes = LatentFormat.BFLOAT16.token_bytes(512, 64)
    request = Request(
        machine=machine_of(device),
        query_dtype=torch.bfloat16,
        fmt=LatentFormat.BFLOAT16,
        latent_dim=512,
        rope_dim=64,
        heads=heads,
        q_len=1,
        batch=batch,
        kv_len=blocks // batch * block,
        block_size=block,
        entries=blocks,
        block_stride=block * token_bytes,
        token_stride=token_bytes,
        window=None,
        sink=False,
        varlen=False,
        batch_invariant=False,
        capturing=False,
        finite_unused=True,
    )
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(blocks, block, width, generator=generator).to(device, torch.bfloat16)
    query = torch.randn(batch, 1, heads, width, generator=generator).to(device, torch.bfloat16)
    table = torch.arange(blocks, dtype=torch.int32, device=device).view(batch, -1)
    lengths = torch.tensor([100, 128], dtype=torch.int32, device=device)

    def decode(name: str) -> Any:
        found = mla_decode(query, cache, table, lengths, scale=width**-0.5, backend=name, finite_unused=True)
        return found.out.float().cpu()

    expected = decode("TORCH_REFERENCE")
    answers = {}
    for verdict in registry.explain(request):
        if verdict.reasons:
            answers[verdict.name] = Answer(False, "; ".join(verdict.reasons))
            continue
        try:
            error = float((decode(verdict.name) - expected).abs().max())
        except Exception as failure:  # of whatever package the backend is
            answers[verdict.name] = Answer(False, f"a call fails: {_one_line(failure)}")
        else:
            wrong = f"a result is off by {error:.3g}" if not error <= KERNEL_BOUND else ""
            answers[verdict.name] = Answer(not wrong, wrong or verdict.by_name_only or "")
    return answers


def vllm() -> Answer:
    """The bridge into vLLM."""
    return _engine("vllm", "kvtide.connectors.vllm", "KvtideConnector")


def sglang() -> Answer:
    """The bridge into SGLang."""
    return _engine("sglang", "kvtide.connectors.sglang", "KvtideHiCacheStorage")


def transformers() -> Answer:
    """The bridge into transformers."""
    return _engine("transformers", "kvtide.connectors.transformers", "KvtideCache")


PROBES: dict[str, Callable[[], Answer | dict[str, Answer]]] = {
    probe.__name__: probe
    for probe in (
        host,
        lmdb,
        shared_storage,
        multi,
        nixl_posix,
        nixl_gds,
        nixl_obj,
        nixl_obj_cu12,
        nixl_peer,
        redis,
        s3,
        mooncake,
        zstd,
        lz4,
        gpu,
        kernels,
        vllm,
        sglang,
        transformers,
    )
}


def answer(name: str) -> Answer | dict[str, Answer]:
    """What a probe finds; whatever it raises is the reason why not."""
    try:
        return PROBES[name]()
    except MissingExtra as error:
        return Answer(False, f"not installed: {str(error).partition('install it with: ')[2]}")
    except (KvtideError, ImportError, OSError) as error:
        return Answer(False, _one_line(error))


@contextmanager
def _directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kvtide-doctor-") as path:
        yield path


def _round_trip(name: str, settings: dict[str, Any]) -> Answer:
    """Put a value into a store of its own, and get it back."""
    from kvtide.connectors.config import make_store
    from kvtide.offload.keys import CHAIN_BYTES, SPACE_BYTES, store_key
    from kvtide.offload.store import Status

    key = store_key(bytes(SPACE_BYTES), bytes(CHAIN_BYTES))
    value, back = os.urandom(VALUE_BYTES), bytearray(VALUE_BYTES)
    with make_store(name, settings) as store:
        put = store.put([key], [value])[0]
        got = store.get_into([key], [back])[0]
        faults = ", ".join(store.stats().faults)
    if (put, got) != (Status.STORED, Status.HIT):
        return Answer(False, f"a put answers {put.name}, a get {got.name}" + (f" ({faults})" if faults else ""))
    return Answer(True) if back == value else Answer(False, "a value comes back changed")


def _plugin(name: str, parameters: dict[str, str], package: str = "nixl") -> Answer:
    """Create a plug-in of NIXL: it lists those whose libraries are missing, too."""
    from kvtide.connectors.transport.nixl_agent import Agent

    try:
        Agent(name, parameters, "DRAM", package).close()
    except ConfigError as error:
        return Answer(False, str(error).partition("; see ")[0])
    return Answer(True, "the plug-in can be created")


def _client(package: str, what: str, extra: str) -> Answer:
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingExtra(what, package, extra) from None
    return Answer(True, "the client loads; a server is needed: kvtide config check --open CONFIG")


def _engine(package: str, bridge: str, name: str) -> Answer:
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        return Answer(False, f"{package} is not installed here")
    getattr(import_module(bridge), name)
    return Answer(True, f"{bridge}:{name} loads")


def _torch(what: str) -> Any:
    try:
        return import_module("torch")
    except ModuleNotFoundError:
        raise MissingExtra(what, "torch", "torch") from None


def _one_line(error: Exception) -> str:
    return " ".join(f"{error}".split())[:300] or type(error).__name__


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # what a library prints is not the answer
        found = answer(sys.argv[1])
    shown = {name: part._asdict() for name, part in found.items()} if isinstance(found, dict) else found._asdict()
    print(json.dumps(shown), flush=True)
    os._exit(0)  # the answer is there; a native library that hangs or crashes at exit does not matter
