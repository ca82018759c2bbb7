"""Real services for the tests: each a subprocess on a free port of 127.0.0.1, killed when its block ends.

A service whose program or package is not installed raises `NotInstalled`, which fixtures turn into a skip. `Service`
also gives the faults: `pause` (SIGSTOP), `resume`, `kill` (SIGKILL), `restart` on the same port.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PASSWORD = "correct-horse"
BUCKET = "kvtide-tests"


class NotInstalled(Exception):
    """The program or package that a service needs is absent; the text names it."""


@contextmanager
def skipping() -> Iterator[None]:
    """A skip, with its reason, where a service is not installed."""
    try:
        yield
    except NotInstalled as missing:
        pytest.skip(str(missing))


class Service:
    """A running subprocess that answers on `port`, or on a socket file."""

    def __init__(self, command: Sequence[str | os.PathLike[str]], ready: Callable[[], bool], log: Path) -> None:
        self._command = [os.fspath(part) for part in command]
        self._ready = ready
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with self._log.open("ab") as log:
            # A session of its own, so that a Ctrl-C meant for the tests does not reach it before they clean up; and it
            # dies with the tests' process, however that ends.
            with_us = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
            command = [*with_us, *self._command]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 60
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self._command[0]} did not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.01)

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Crash it, and start it again on the same port, empty."""
        self.kill()
        self.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hang it for as long as the block runs: it keeps its connections and answers nothing."""
        assert self._process is not None
        pause(self._process.pid)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


@dataclass
class Redis:
    """A redis-server without persistence."""

    service: Service
    port: int
    folder: Path

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.folder / 'redis.sock'}"

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.pem"


@dataclass
class S3:
    """An S3-compatible server that keeps objects in memory."""

    service: Service
    endpoint: str

    def client(self) -> Any:
        """A plain client of it."""
        import boto3

        return boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1")


@dataclass
class Mooncake:
    """A mooncake_master with TCP."""

    service: Service
    port: int
    metrics_port: int


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def listens(port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def redis_server(folder: Path, *options: str, secured: bool = False) -> Iterator[Redis]:
    """A redis-server on a port and on a Unix socket; `secured`: TLS only, and a password for the user `kvtide`."""
    port = free_port()
    command = [program("redis-server"), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]
    command += ["--unixsocket", folder / "redis.sock", "--loglevel", "warning"]
    if secured:
        _certificate(folder)
        command += ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no", "--tls-ca-cert-file"]
        command += [folder / "ca.pem", "--tls-cert-file", folder / "server.pem", "--tls-key-file", folder / "key.pem"]
        command += ["--user", "kvtide", "on", f">{PASSWORD}", "~*", "&*", "+@all", "--user", "default", "off"]
    else:
        command += ["--port", str(port)]
    service = Service([*command, *options], lambda: listens(port), folder / "redis.log")
    try:
        yield Redis(service, port, folder)
    finally:
        service.kill()


@contextmanager
def redis_cluster(folder: Path) -> Iterator[list[Redis]]:
    """Three redis-servers as one cluster, all slots served."""
    import redis

    with ExitStack() as stack:
        nodes = []
        for number in range(3):
            home = folder / str(number)
            home.mkdir()
            # Longer than a test pauses a node: once the others notice, they answer CLUSTERDOWN for every slot.
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "15000")
            nodes.append(stack.enter_context(redis_server(home, *options)))
        clients = [stack.enter_context(redis.Redis(port=node.port)) for node in nodes]
        for number, client in enumerate(clients):
            first, last = 16384 * number // 3, 16384 * (number + 1) // 3 - 1
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER MEET", "127.0.0.1", nodes[0].port)
        wait_for(lambda: all(client.cluster("info")["cluster_state"] == "ok" for client in clients))
        yield nodes


@contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """An S3-compatible server."""
    try:
        import moto.server  # noqa: F401
    except ImportError:
        raise NotInstalled("moto[server] is not installed") from None
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    service = Service(command, lambda: listens(port), folder / "s3.log")
    try:
        yield S3(service, f"http://127.0.0.1:{port}")
    finally:
        service.kill()


@contextmanager
def mooncake_master(folder: Path, *options: str) -> Iterator[Mooncake]:
    """A Mooncake master for TCP clients; values lie in the memory of the clients that bring segments."""
    port, metrics_port = free_port(), free_port()
    command = [program("mooncake_master"), f"-rpc_port={port}", "-rpc_address=127.0.0.1"]
    command += [f"-metrics_port={metrics_port}", "-metrics_host=127.0.0.1", *options]
    service = Service(command, lambda: listens(port) and listens(metrics_port), folder / "mooncake.log")
    try:
        yield Mooncake(service, port, metrics_port)
    finally:
        service.kill()


def program(name: str) -> str:
    """Where a program is; `NotInstalled` without it."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise NotInstalled(f"{name} is not installed")
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Ask until it is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {seconds} s")
        time.sleep(0.02)


def _certificate(folder: Path) -> None:
    """A certificate authority (ca.pem) and a server certificate for 127.0.0.1 that it signed."""
    openssl = program("openssl")
    new = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    ca = ["-keyout", folder / "ca.key", "-out", folder / "ca.pem", "-subj", "/CN=kvtide test CA"]
    server = ["-keyout", folder / "key.pem", "-out", folder / "server.pem", "-subj", "/CN=127.0.0.1"]
    server += ["-CA", folder / "ca.pem", "-CAkey", folder / "ca.key", "-addext", "subjectAltName=IP:127.0.0.1"]
    server += ["-addext", "basicConstraints=critical,CA:FALSE"]
    for arguments in (ca, server):
        subprocess.run([*new, *arguments], check=True, capture_output=True)


def pause(pid: int) -> None:
    """Stop a process, and wait until all of it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_for(lambda: all(_state(task / "stat") in "TZ" for task in tasks.iterdir()))


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


def after(seconds: float, call: Callable[[], None]) -> threading.Timer:
    """Run a call on a thread of its own, later."""
    timer = threading.Timer(seconds, call)
    timer.start()
    return timer
