"""What the stores in other processes cost: beside their own clients moving the same bytes to the same service.

    python benchmarks/offload_remote.py [--quick] [--json FILE] [--only STORE]...

The services are started here: redis-server and mooncake_master from the path, moto for S3, NIXL in process, and a
second process for a NIXL peer; a store whose service or package is missing is left out, and said so. Times are per
value, medians over repetitions in which kvtide and the plain client take turns; a ratio is peer / kvtide, so that 1
means that header, checksum, and the copy out of a lane cost nothing. All are on one machine: what a network adds is
added to both.

    put, get    a batch of values that are not there, are there; the plain client does the same without header and check
    lookup      a batch of keys of which half are there
    first byte  a batch of one small value (latency)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from report import Figure, alternate, common_options, publish, scaled

from kvtide.kvcache import KvtideError
from kvtide.offload.keys import KEY_BYTES
from kvtide.offload.store import Status, Store

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "connectors"))

import services

SMALL = 4096


@dataclass(frozen=True)
class Plain:
    """A service's own client: `put`, `get` and `delete` of values under names."""

    put: Callable[[Sequence[str], Sequence[bytearray]], Any]
    get: Callable[[Sequence[str], Sequence[bytearray]], Any]
    delete: Callable[[Sequence[str]], Any]


@dataclass(frozen=True)
class Size:
    """Bytes of a value, and values of a batch."""

    num_bytes: int
    batch: int

    def __str__(self) -> str:
        return f"{self.num_bytes >> 10} KiB" if self.num_bytes < 1 << 20 else f"{self.num_bytes >> 20} MiB"


Opened = tuple[Store, Plain]


@contextmanager
def redis_store(folder: Path) -> Iterator[Opened]:
    """Redis over TCP; beside redis-py's pipelines."""
    import redis

    from kvtide.connectors.redis import RedisConfig, RedisConnector

    def put(names: Sequence[str], values: Sequence[bytearray]) -> None:
        pipe = client.pipeline(transaction=False)
        for name, value in zip(names, values, strict=True):
            pipe.set(name, bytes(value))
        pipe.execute()

    def get(names: Sequence[str], targets: Sequence[bytearray]) -> None:
        for target, value in zip(targets, client.mget(names), strict=True):
            target[:] = value

    with (
        services.redis_server(folder) as server,
        redis.Redis(port=server.port) as client,
        RedisConnector(RedisConfig(url=server.url)) as store,
    ):
        yield store, Plain(put, get, lambda names: client.delete(*names))


@contextmanager
def s3_store(folder: Path) -> Iterator[Opened]:
    """S3 on a small HTTP server, which bounds both; beside boto3 on as many threads."""
    from kvtide.connectors.s3 import S3Config, S3Connector

    os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}

    def put(names: Sequence[str], values: Sequence[bytearray]) -> None:
        list(pool.map(lambda name, value: client.put_object(Bucket="bench", Key=name, Body=value), names, values))

    def get(names: Sequence[str], targets: Sequence[bytearray]) -> None:
        def one(name: str, target: bytearray) -> None:
            target[:] = client.get_object(Bucket="bench", Key=name)["Body"].read()

        list(pool.map(one, names, targets))

    with services.s3_server(folder) as server, ThreadPoolExecutor(4) as pool:
        client = server.client()
        client.create_bucket(Bucket="bench")
        with S3Connector(S3Config(bucket="bench", endpoint_url=server.endpoint, threads=4)) as store:
            yield (
                store,
                Plain(put, get, lambda names: [client.delete_object(Bucket="bench", Key=name) for name in names]),
            )


@contextmanager
def mooncake_store(folder: Path) -> Iterator[Opened]:
    """Mooncake over TCP, values in this process's own segment; beside the library on registered memory."""
    from kvtide.connectors.mooncake import MooncakeConfig, MooncakeConnector
    from kvtide.connectors.transport.lanes import Memory

    with services.mooncake_master(folder, "-default_kv_lease_ttl=100") as server:
        config = MooncakeConfig(
            master_server_address=f"127.0.0.1:{server.port}",
            metrics_port=server.metrics_port,
            local_hostname="127.0.0.1",
            global_segment_size="1GiB",
        )
        with MooncakeConnector(config) as store:
            memory = Memory(64 << 20)
            store.library.register_buffer(memory.address, len(memory.view))

            def call(function: Callable[..., list[int]], names: Sequence[str], values: Sequence[bytearray]) -> None:
                places = [memory.address + at * len(value) for at, value in enumerate(values)]
                codes = function(list(names), places, [len(value) for value in values])
                assert min(codes) >= 0, codes

            yield (
                store,
                Plain(
                    lambda names, values: call(store.library.batch_put_from, names, values),
                    lambda names, targets: call(store.library.batch_get_into, names, targets),
                    lambda names: store.library.batch_remove(list(names), True),
                ),
            )


@contextmanager
def nixl_store(folder: Path) -> Iterator[Opened]:
    """Files that NIXL moves (POSIX); beside one plain file per value, written, renamed, and read."""
    from kvtide.connectors.nixl import NixlConfig, NixlConnector

    def put(names: Sequence[str], values: Sequence[bytearray]) -> None:
        for name, value in zip(names, values, strict=True):
            (folder / f"{name}.part").write_bytes(value)
            (folder / f"{name}.part").rename(folder / name)

    def get(names: Sequence[str], targets: Sequence[bytearray]) -> None:
        for name, target in zip(names, targets, strict=True):
            with (folder / name).open("rb", buffering=0) as file:
                file.readinto(target)

    with NixlConnector(NixlConfig(path=str(folder / "store"))) as store:
        yield store, Plain(put, get, lambda names: [(folder / name).unlink() for name in names])


PEER = """
import sys
from kvtide.connectors.host import HostConfig, HostConnector
from kvtide.connectors.nixl_server import PeerServer
store = HostConnector(HostConfig(max_bytes="512MiB"))
server = PeerServer(store, connections=2)
print(server.address, flush=True)
for line in sys.stdin:
    count, size = map(int, line.split())
    keys = [number.to_bytes(32, "little") for number in range(count)]
    store.delete(keys)
    store.put(keys, [bytes(size)] * count)
    print("stored", flush=True)
"""


class Peer:
    """Another process that holds values, and the store that reads them."""

    def __init__(self, process: subprocess.Popen[str], store: Store) -> None:
        self._process = process
        self.store = store

    def hold(self, count: int, size: int) -> list[bytes]:
        """Let it hold values; their keys."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count} {size}\n")
        self._process.stdin.flush()
        self._process.stdout.readline()
        return [number.to_bytes(32, "little") for number in range(count)]


@contextmanager
def peer_store() -> Iterator[Peer]:
    """A peer on this machine: UCX takes TCP or the kernel's copy between processes."""
    from kvtide.connectors.nixl_peer import NixlPeerConfig, NixlPeerConnector

    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PEER], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            with NixlPeerConnector(NixlPeerConfig(address=process.stdout.readline().strip())) as store:
                yield Peer(process, store)
        finally:
            process.kill()


STORES: Mapping[str, Callable[[Path], Any]] = {
    "redis": redis_store,
    "s3": s3_store,
    "mooncake": mooncake_store,
    "nixl_posix": nixl_store,
}


class Contest:
    """Puts and gets of one size, by the store and by the plain client; each method is one timed batch."""

    def __init__(self, store: Store, plain: Plain, size: Size) -> None:
        self._store = store
        self._plain = plain
        self._sources = [bytearray(os.urandom(size.num_bytes)) for _ in range(size.batch)]
        self._targets = [bytearray(size.num_bytes) for _ in range(size.batch)]
        self._keys: list[bytes] = []
        self._names: list[str] = []

    def put(self) -> float:
        """By the store, under new keys."""
        self._store.delete(self._keys)
        self._keys = [os.urandom(KEY_BYTES) for _ in self._sources]
        return timed(lambda: served(self._store.put(self._keys, self._sources), Status.STORED))

    def get(self) -> float:
        """By the store, what it put last."""
        return timed(lambda: served(self._store.get_into(self._keys, self._targets), Status.HIT))

    def plain_put(self) -> float:
        """By the plain client, under new names."""
        if self._names:
            self._plain.delete(self._names)
        self._names = [os.urandom(KEY_BYTES).hex() for _ in self._sources]
        return timed(lambda: self._plain.put(self._names, self._sources))

    def plain_get(self) -> float:
        """By the plain client, what it put last."""
        return timed(lambda: self._plain.get(self._names, self._targets))

    def end(self) -> None:
        """Leave nothing."""
        self._store.delete(self._keys)
        self._plain.delete(self._names)


def measure(name: str, store: Store, plain: Plain, sizes: Sequence[Size], repetitions: int) -> Iterator[Figure]:
    """The figures of one store."""
    for size in sizes:
        contest = Contest(store, plain, size)
        for operation, ours, theirs in (
            ("put", contest.put, contest.plain_put),
            ("get", contest.get, contest.plain_get),
        ):
            value, peer = alternate(repetitions, ours, theirs)
            yield per_value(f"{name} {operation} {size}", size, value, peer)
        contest.end()
    yield from latency(name, store, repetitions)


def per_value(name: str, size: Size, value: float | None, peer: float | None = None) -> Figure:
    """A figure of a batch's seconds."""
    assert value is not None
    note = f"batch of {size.batch}: {size.batch * size.num_bytes / value / 1e6:,.0f} MB/s"
    return Figure(name, scaled(value, 1e6 / size.batch), "us", scaled(peer, 1e6 / size.batch), note=note)


def latency(name: str, store: Store, repetitions: int) -> Iterator[Figure]:
    """A small value, and a lookup."""
    keys = [os.urandom(KEY_BYTES) for _ in range(1000)]
    store.put(keys[::2], [bytes(100)] * 500)
    (value,) = alternate(repetitions, lambda: timed(lambda: store.contains(keys)))
    yield Figure(f"{name} lookup", scaled(value, 1e6 / 1000), "us", note="one of 1000 keys, half of them there")
    store.delete(keys[::2])
    store.put(keys[:1], [bytes(SMALL)])
    buffer = bytearray(SMALL)
    (value,) = alternate(4 * repetitions, lambda: timed(lambda: store.get_into(keys[:1], [buffer])))
    yield Figure(f"{name} first byte", scaled(value, 1e6), "us", note="get of one value of 4 KiB")
    store.delete(keys[:1])


def measure_peer(peer: Peer, sizes: Sequence[Size], repetitions: int) -> Iterator[Figure]:
    """A peer's values are only read."""
    for name, size, times in (
        *((f"nixl_peer get {size}", size, repetitions) for size in sizes),
        ("nixl_peer first byte", Size(SMALL, 1), 4 * repetitions),
    ):
        get = partial(peer.store.get_into, peer.hold(size.batch, size.num_bytes))
        targets = [bytearray(size.num_bytes) for _ in range(size.batch)]
        (value,) = alternate(
            times, partial(timed, partial(lambda get, targets: served(get(targets), Status.HIT), get, targets))
        )
        yield per_value(name, size, value)


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def served(statuses: Sequence[Status], expected: Status) -> None:
    """A figure of an operation that did not do it would be worth nothing."""
    if set(statuses) != {expected}:
        raise click.ClickException(f"not all {expected.name}: {sorted({status.name for status in statuses})}")


@click.command()
@click.option("--only", "only", multiple=True, type=click.Choice([*STORES, "nixl_peer"]), help="Measure these stores.")
@common_options
def main(only: tuple[str, ...], quick: bool, smoke: bool, json_file: Path | None) -> None:
    """Measure kvtide's stores in other processes beside the services' own clients."""
    sizes = [Size(256 << 10, 16), Size(4 << 20, 4)]
    repetitions = 5 if quick else 25
    if smoke:
        sizes, repetitions = [Size(64 << 10, 2)], 1
    figures: list[Figure] = []
    with ExitStack() as stack:
        for name in only or [*STORES, "nixl_peer"]:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"kvtide-{name}-")))
            try:
                if name == "nixl_peer":
                    with peer_store() as peer:
                        figures += measure_peer(peer, sizes, repetitions)
                else:
                    with STORES[name](folder) as (store, plain):
                        figures += measure(name, store, plain, sizes, repetitions)
            except (services.NotInstalled, ImportError, KvtideError) as missing:
                click.echo(f"{name} is left out: {missing}", err=True)
    publish("kvtide's stores in other processes", figures, json_file)


if __name__ == "__main__":
    main()
