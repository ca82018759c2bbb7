"""NixlPeerConnector and PeerServer over UCX: conformance in one process, faults between two."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import services

from kvtide.connectors.config import load_config, open_store, store_settings
from kvtide.connectors.host import HostConfig, HostConnector
from kvtide.connectors.nixl_peer import NixlPeerConfig, NixlPeerConnector
from kvtide.connectors.nixl_server import PeerServer
from kvtide.connectors.transport.peer_messages import (
    Answer,
    Contains,
    Fetch,
    Hello,
    receive_answer,
    receive_request,
    send,
)
from kvtide.connectors.transport.peer_secret import make_proof
from kvtide.kvcache import ConfigError, KvtideError
from kvtide.offload.conformance import StoreConformance, key_of, value_of
from kvtide.offload.store import Entry, Status, Store, StoreStats
from kvtide.offload.values import HEADER_BYTES, Header

PACKAGE = "nixl_cu12"
pytest.importorskip("nixl_cu12", exc_type=ImportError)


@pytest.fixture(autouse=True, scope="module")
def loopback() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_NET_DEVICES", "lo")
        yield


def open_peer(address: str, **settings: Any) -> NixlPeerConnector:
    fixed = {"address": address, "package": PACKAGE, "lane_bytes": "8MiB", "timeout_seconds": 20.0}
    return NixlPeerConnector(NixlPeerConfig(**{**fixed, **settings}))


class Served(Store):
    """A host store, written to directly and read through a peer: what the conformance suite asks of one store."""

    def __init__(self) -> None:
        self.host = HostConnector(HostConfig(max_bytes="64MiB"))
        self.server = PeerServer(self.host, connections=2, share_bytes="8MiB", package=PACKAGE)
        self.peer = open_peer(self.server.address)

    def contains(self, keys: Sequence[bytes]) -> list[Status]:
        return self.peer.contains(keys)

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[Status]:
        return self.peer.get_into(keys, buffers)

    def headers(self, keys: Sequence[bytes]) -> list[Header | None]:
        return self.peer.headers(keys)

    def scan(self) -> Iterator[Entry]:
        return self.peer.scan()

    def put(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[Status]:
        return self.host.put(keys, buffers)

    def delete(self, keys: Sequence[bytes]) -> list[Status]:
        return self.host.delete(keys)

    def stats(self) -> StoreStats:
        stats = self.peer.stats()
        stats.outcomes += self.host.stats().outcomes
        return stats

    def close(self) -> None:
        self.peer.close()
        self.server.close()
        self.host.close()


class TestPeer(StoreConformance):
    holds = False
    scans = True
    # What is about putting and deleting is the host store's, and what is about closing is tried below.
    test_outcomes_are_counted_and_looking_is_not = None
    test_a_value_above_the_bound_is_refused = None
    test_closing_leaves_no_files_and_no_threads = None
    test_closing_waits_for_running_calls = None
    test_a_value_of_another_length_is_never_served = None
    test_accounting_is_exact_and_returns_to_nothing = None

    def open_store(self, place: Any) -> Store:
        return Served()


SERVER = """
import sys, time
from kvtide.connectors.host import HostConfig, HostConnector
from kvtide.connectors.nixl_server import PeerServer
port, count, size = map(int, sys.argv[1:])
store = HostConnector(HostConfig(max_bytes="256MiB"))
keys = [bytes([i + 1]) * 32 for i in range(count)]
store.put(keys, [key * (size // 32) for key in keys])
server = PeerServer(store, port=port, connections=2, share_bytes="128MiB", package="nixl_cu12")
print(server.address, flush=True)
time.sleep(600)
"""


@contextmanager
def serving(count: int, size: int, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process that holds `count` values of `size` bytes; and its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port), str(count), str(size)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def read(store: Store, count: int, size: int) -> list[Status]:
    """Read all; whatever is HIT is right."""
    keys = [bytes([i + 1]) * 32 for i in range(count)]
    buffers = [bytearray(size) for _ in keys]
    statuses = store.get_into(keys, buffers)
    for key, buffer, status in zip(keys, buffers, statuses, strict=True):
        assert status is not Status.HIT or buffer == key * (size // 32)
    return statuses


def test_a_peer_that_is_killed_mid_read_is_an_error_and_one_that_comes_back_is_read_again() -> None:
    count, size = 24, 4 << 20
    port = services.free_port()
    settings: dict[str, Any] = {"lane_bytes": "128MiB", "lanes": 1}
    with open_peer(f"127.0.0.1:{port}", **settings) as store:
        memory = store._lanes.all[0].memory
        torn = False
        for _ in range(5):
            with serving(count, size, port) as (process, _):
                assert read(store, count, size) == [Status.HIT] * count
                memory[:] = bytes(len(memory))
                killer = threading.Thread(target=kill_when_bytes_arrive, args=(process, memory))
                killer.start()
                statuses = read(store, count, size)
                killer.join()
                process.wait()
                assert set(statuses) <= {Status.HIT, Status.ERROR}
                started = time.monotonic()
                assert set(read(store, count, size)) == {Status.ERROR}
                assert store.contains([bytes([1]) * 32]) == [Status.ERROR]
                assert time.monotonic() - started < 20  # refused, and not waited for
            torn = Status.ERROR in statuses
            if torn:
                break
        assert torn  # the kill came in the middle, not after it
        assert any(kind.startswith("nixl") for kind in store.stats().faults), store.stats().faults
        with serving(count, size, port):
            assert read(store, count, size) == [Status.HIT] * count


def kill_when_bytes_arrive(process: subprocess.Popen[str], memory: memoryview) -> None:
    while not memory[0]:
        time.sleep(0.0005)
    os.kill(process.pid, signal.SIGKILL)


def test_a_peer_that_hangs_is_an_error_in_time_and_is_read_again() -> None:
    with serving(4, 32_000) as (process, address), open_peer(address, lanes=1, timeout_seconds=3.0) as store:
        assert read(store, 4, 32_000) == [Status.HIT] * 4
        services.pause(process.pid)
        started = time.monotonic()
        assert read(store, 4, 32_000) == [Status.ERROR] * 4
        assert store.stats().num_values == 0
        assert time.monotonic() - started < 20
        process.send_signal(signal.SIGCONT)
        services.wait_for(lambda: read(store, 4, 32_000) == [Status.HIT] * 4)
        assert store.stats().num_values == 4
        assert store.stats().faults["timeout"] >= 4


def test_a_share_that_was_written_anew_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fetches into one share, the first read late: its bytes are whole, but of another number."""
    with Served() as store:
        keys = [key_of(1), key_of(2)]
        store.put(keys, [value_of(key, 1000) for key in keys])
        fetch = store.server._fetch

        def fetch_twice(*args: Any) -> Any:
            first = fetch(*args)
            fetch(*args)
            return first

        monkeypatch.setattr(store.server, "_fetch", fetch_twice)
        assert set(store.get_into(keys, [bytearray(1000) for _ in keys])) == {Status.CORRUPT}
        assert store.peer.stats().faults["another generation"] == 2
        monkeypatch.undo()
        assert store.verify(keys) == [Status.HIT] * 2


def test_flipped_bytes_in_a_share_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with Served() as store:
        key = key_of(1)
        store.put([key], [value_of(key, 1000)])
        fetch = store.server._fetch

        def fetch_and_flip(request: Any, share: int) -> Any:
            answer = fetch(request, share)
            store.server._memory.view[share * store.server._share_bytes + HEADER_BYTES + 500] ^= 1
            return answer

        monkeypatch.setattr(store.server, "_fetch", fetch_and_flip)
        assert store.get_into([key], [bytearray(1000)]) == [Status.CORRUPT]
        assert store.peer.stats().faults["payload checksum"] == 1


def test_more_than_a_share_is_read_in_parts_and_more_readers_than_shares_are_told() -> None:
    with Served() as store:
        keys = [key_of(i) for i in range(5)]
        store.put(keys, [value_of(key, 3 << 20) for key in keys])
        assert store.verify(keys) == [Status.HIT] * 5
        buffers = [bytearray(3 << 20) for _ in keys]
        assert store.get_into(keys, buffers) == [Status.HIT] * 5
        assert buffers == [value_of(key, 3 << 20) for key in keys]
        with open_peer(store.server.address) as second, open_peer(store.server.address) as third:
            assert second.contains(keys) == [Status.HIT] * 5
            assert third.contains(keys) == [Status.ERROR] * 5
            assert third.stats().faults["peer is busy"] >= 5
            second.close()
            services.wait_for(lambda: third.contains(keys) == [Status.HIT] * 5)


def test_a_peers_values_are_its_own() -> None:
    with Served() as store:
        store.put([key_of(1)], [bytes(100)])
        assert store.peer.put([key_of(2)], [bytes(100)]) == [Status.REFUSED]
        assert store.peer.delete([key_of(1)]) == [Status.ERROR]
        assert store.contains([key_of(1), key_of(2)]) == [Status.HIT, Status.MISS]


def test_garbage_on_the_port_ends_that_connection_only() -> None:
    with Served() as store:
        host, port = store.server.address.split(":")
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\x7f", b"\x03\x00\x00\x00\xc1\xc1\xc1"):
            address = (host, int(port))
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=5) as connection:
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(1) == b""  # if it has not hung up by now
        store.put([key_of(1)], [bytes(100)])
        assert store.contains([key_of(1)]) == [Status.HIT]


def test_a_fetch_beyond_its_share_is_refused() -> None:
    with Served() as store:
        for length, offset in ((-1, 0), (8 << 20, 0), (100, 8 << 20), (100, -50)):
            with pytest.raises(KvtideError):
                store.server._fetch(Fetch(keys=[key_of(1)], lengths=[length], offsets=[offset]), 0)


def test_a_peer_that_is_not_there() -> None:
    with open_peer("127.0.0.1:1") as store:
        assert store.contains([key_of(1)]) == [Status.ERROR]
        assert store.headers([key_of(1)]) == [None]
        assert list(store.scan()) == []
        assert store.stats().faults["connection"] >= 2
    with Served() as taken, pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:.*in use"):
        PeerServer(taken.host, port=int(taken.server.address.split(":")[1]), package=PACKAGE)


def test_settings_are_read_as_every_stores_are() -> None:
    path = "kvtide.connectors.nixl_peer:NixlPeerConnector"
    assert store_settings(path, {"address": "[::1]:5"}) == NixlPeerConfig(address="[::1]:5")
    with pytest.raises(ConfigError, match="address is 'h'; expected"):
        store_settings(path, {"address": "h"})


def test_a_process_that_used_ucx_exits_as_it_should() -> None:
    """Some builds of UCX crash the process at its exit: an engine's exit code must stay its own."""
    code = f"""
from kvtide.connectors.nixl_peer import NixlPeerConfig, NixlPeerConnector
with NixlPeerConnector(NixlPeerConfig(address="127.0.0.1:1", package="{PACKAGE}")) as store:
    store.contains([bytes(32)])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


SECRET = "correct horse battery staple"


@pytest.mark.parametrize(
    ("servers", "readers", "fault"),
    [
        (SECRET, SECRET, None),
        (SECRET, None, "peer wants a secret"),
        (SECRET, SECRET + "!", "peer has another secret"),
        (None, SECRET, "peer has no secret"),
    ],
)
def test_readers_and_servers_prove_one_secret(
    servers: str | None, readers: str | None, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if readers is not None:
        monkeypatch.setenv("KV_SECRET", readers)
    with (
        HostConnector(HostConfig(max_bytes="1MiB")) as host,
        PeerServer(host, package=PACKAGE, secret=servers, share_bytes="1MiB") as server,
        open_peer(server.address, secret_env="KV_SECRET" if readers is not None else None) as store,
    ):
        host.put([key_of(1)], [value_of(key_of(1), 100)])
        buffer = bytearray(100)
        status = store.get_into([key_of(1)], [buffer])
        if fault is None:
            assert status == [Status.HIT]
            assert buffer == value_of(key_of(1), 100)
        else:
            assert status == [Status.ERROR]
            assert buffer == bytes(100)
            assert store.stats().faults[fault] >= 1


def test_a_stranger_learns_nothing_from_a_server_with_a_secret() -> None:
    with (
        HostConnector(HostConfig(max_bytes="1MiB")) as host,
        PeerServer(host, package=PACKAGE, secret=SECRET, share_bytes="1MiB") as server,
    ):
        address = (server.address.split(":")[0], int(server.address.split(":")[1]))

        def say(*requests: Any) -> list[Answer]:
            answers = []
            with socket.create_connection(address, timeout=5) as connection, contextlib.suppress(OSError):
                for request in requests:
                    send(connection, request)
                    answers.append(receive_answer(connection))
            return answers

        (first, *_) = challenges = say(Hello(nonce=bytes(32)))
        assert challenges == [Answer(nonce=first.nonce)]
        assert len(first.nonce) == 32
        assert say(Hello())[0].nonce != first.nonce
        late = make_proof(SECRET, "reader", first.nonce, bytes(32))  # of another connection: a replay
        for proof in (b"", late, make_proof(SECRET, "server", first.nonce, bytes(32))):
            assert say(Hello(), Hello(nonce=bytes(32), proof=proof))[1] == Answer(refused=True)
        assert say(Hello(), Contains(keys=[key_of(1)]))[1] == Answer(refused=True)
        assert say(Hello(), Hello(nonce=b"", proof=b""))[1:] == [Answer(refused=True)]


def test_a_server_that_cannot_prove_the_secret_is_not_read_from(tmp_path: Path) -> None:
    """Something else on the port asks for a proof, and sends a real server's metadata."""
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    with Served() as store, socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                receive_request(connection)
                send(connection, Answer(nonce=bytes(32)))
                hello = receive_request(connection)
                send(connection, Answer("x", store.server._metadata, 1, 1 << 20, proof=hello.proof))

        thread = threading.Thread(target=pretend)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with open_peer(address, secret_file=str(file), timeout_seconds=4.0) as victim:
            assert victim.contains([key_of(1)]) == [Status.ERROR]
            assert victim.stats().faults["peer has another secret"] == 1
        thread.join()


def test_other_addresses_than_loopback_need_a_secret() -> None:
    with HostConnector(HostConfig(max_bytes="1MiB")) as host:
        with pytest.raises(ConfigError, match=r"on 0\.0\.0\.0 needs a secret"):
            PeerServer(host, host="0.0.0.0", package=PACKAGE, share_bytes="1MiB")
        with pytest.raises(ConfigError, match="has 5 characters; at least 16"):
            PeerServer(host, package=PACKAGE, secret="short")
        with PeerServer(host, host="0.0.0.0", package=PACKAGE, share_bytes="1MiB", secret=SECRET):
            pass


def test_the_command_serves_a_store_beside_its_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": str(tmp_path)}}
    monkeypatch.setenv("KV_SECRET", SECRET)
    arguments = ["store", "serve", json.dumps(config), "--package", PACKAGE, "--secret-env", "KV_SECRET"]
    with open_store(load_config(config, environ={})) as writer:
        writer.put([key_of(1)], [value_of(key_of(1), 5000)])
        command = [sys.executable, "-c", "from kvtide.cli.main import run; run()", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            # UCX may say things of its own before.
            line = next(line for line in process.stdout if line.startswith("serving on 127.0.0.1:"))
            with open_peer(line.split()[-1], secret_env="KV_SECRET") as store:
                buffer = bytearray(5000)
                assert store.get_into([key_of(1)], [buffer]) == [Status.HIT]
                assert buffer == value_of(key_of(1), 5000)
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
