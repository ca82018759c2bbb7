"""`kvtide store serve`: let other engines read a store through NIXL, until it is told to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import click

from kvtide.offload.store import Store


def serve_store(
    store: Store,
    *,
    host: str,
    port: int,
    connections: int,
    share_bytes: int,
    package: str,
    secret: str | None,
) -> None:
    """Serve until SIGINT or SIGTERM; prints the address once it can be reached."""
    from kvtide.connectors.nixl_server import PeerServer

    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with PeerServer(
            store,
            host=host,
            port=port,
            connections=connections,
            share_bytes=share_bytes,
            package=package,
            secret=secret,
        ) as server:
            click.echo(f"serving on {server.address}")
            stopped.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
