"""PeerServer: serves what a store holds to other engines' `NixlPeerConnector`s, by NIXL's UCX.

    with PeerServer(store, host="10.0.0.5") as server:
        print(server.address)

Each connection has a thread and a share of registered memory. A fetch copies values from the store into the share,
checked by the store as any read of it, under headers that carry a number which no other value of the server has; then
the reader takes them from there. The share belongs to the connection until it ends, so that nothing has to be locked
in the store while a peer reads, and a peer that stalls holds up nobody. On any address but the machine's own, readers
have to prove a secret (`peer_secret`) before they learn anything; bytes travel as they are, so keep the port to the
engines' network all the same.
"""

from __future__ import annotations

import contextlib
import heapq
import ipaddress
import itertools
import secrets
import socket
import threading

import msgspec

from kvtide.kvcache import ConfigError, KvtideError
from kvtide.kvcache.sizes import parse_bytes
from kvtide.offload.store import Status, Store
from kvtide.offload.values import HEADER_BYTES, Header, make_header

from .transport.lanes import Memory, aligned
from .transport.nixl_agent import Agent
from .transport.peer_messages import (
    Answer,
    AnyRequest,
    Contains,
    Fetch,
    Heads,
    Hello,
    Scan,
    Stats,
    receive_request,
    send,
)
from .transport.peer_secret import is_proof, make_nonce, make_proof

LEAST_SECRET = 16
_GREETING_S = 10.0  # that a connection may take to become a reader


class PeerServer:
    """Serves a store, which stays its owner's to close. `ConfigError` when UCX or the address cannot be had.

    Readers must have the `secret`, if there is one; without one only addresses of the loopback interface are served.
    """

    def __init__(
        self,
        store: Store,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        connections: int = 8,
        share_bytes: int | str = "64MiB",
        package: str = "nixl",
        secret: str | None = None,
    ) -> None:
        if secret is not None and len(secret) < LEAST_SECRET:
            raise ConfigError(f"the secret of a peer server has {len(secret)} characters; at least {LEAST_SECRET}")
        self._store = store
        self._secret = secret
        self._share_bytes = aligned(parse_bytes(share_bytes))
        self._memory = Memory(connections * self._share_bytes)
        # With a progress thread, since peers read while nobody here asks the agent for anything.
        self._agent = Agent("UCX", {}, "DRAM", package, progress_thread=True)
        self._agent.register(self._memory.address, len(self._memory.view))
        self._metadata = self._agent.metadata()
        self._free = list(range(connections))
        self._numbers = itertools.count(secrets.randbits(56))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(f"a peer server cannot listen on {host}:{port}: {error.strerror}") from None
        if secret is None and not ipaddress.ip_address(self._listener.getsockname()[0]).is_loopback:
            self._listener.close()
            raise ConfigError(f"a peer server on {host} needs a secret; without one it may only serve on 127.0.0.1")
        self._acceptor = threading.Thread(target=self._accept, name="kvtide-peer-server", daemon=True)
        self._acceptor.start()

    @property
    def address(self) -> str:
        """host:port that it serves on."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """End every connection. A reader in a transfer gets an error."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._open)
        for connection in (self._listener, *connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        for thread in self._threads:
            thread.join()
        self._agent.close()

    def __enter__(self) -> PeerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._open.add(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), name="kvtide-peer", daemon=True)
            self._threads = [*(thread for thread in self._threads if thread.is_alive()), thread]
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        share: int | None = None
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a reader's machine may be gone
            connection.settimeout(_GREETING_S)
            with connection, contextlib.suppress(OSError, msgspec.MsgspecError):
                greeting = self._greet(connection)
                if greeting is None:
                    return
                with self._lock:
                    share = self._free.pop() if self._free else None
                if share is None:
                    send(connection, Answer(proof=greeting))
                    return
                address = self._memory.address + share * self._share_bytes
                send(connection, Answer(self._agent.name, self._metadata, address, self._share_bytes, proof=greeting))
                connection.settimeout(None)
                while True:
                    try:
                        answer = self._answer(receive_request(connection), share)
                    except KvtideError:  # no key, or lengths that are none
                        return
                    send(connection, answer)
        finally:
            with self._lock:
                self._open.discard(connection)
                if share is not None:
                    self._free.append(share)

    def _greet(self, connection: socket.socket) -> bytes | None:
        """What proves this side to a reader that has proved itself; None for one that has not."""
        hello = receive_request(connection)
        if self._secret is None:
            return b"" if isinstance(hello, Hello) else None
        nonce = make_nonce()
        send(connection, Answer(nonce=nonce))
        hello = receive_request(connection)
        if not isinstance(hello, Hello) or not is_proof(hello.proof, self._secret, "reader", nonce, hello.nonce):
            send(connection, Answer(refused=True))
            return None
        return make_proof(self._secret, "server", nonce, hello.nonce)

    def _answer(self, request: AnyRequest, share: int) -> Answer:
        match request:
            case Hello():
                raise KvtideError("a connection greets once")
            case Contains():
                return Answer(statuses=[int(status) for status in self._store.contains(request.keys)])
            case Fetch():
                return self._fetch(request, share)
            case Heads():
                return Answer(heads=[_plain(head) for head in self._store.headers(request.keys)])
            case Scan():
                rest = (entry for entry in self._store.scan() if entry.key > request.after)
                return Answer(entries=[(entry.key, entry.num_bytes) for entry in heapq.nsmallest(request.most, rest)])
            case Stats():
                stats = self._store.stats()
                return Answer(counts=(stats.num_values, stats.num_bytes, stats.capacity_bytes))

    def _fetch(self, request: Fetch, share: int) -> Answer:
        begin = share * self._share_bytes
        mine = self._memory.view[begin : begin + self._share_bytes]
        places = [
            mine[offset : offset + HEADER_BYTES + length]
            for length, offset in zip(request.lengths, request.offsets, strict=False)
        ]
        for place, length in zip(places, request.lengths, strict=False):
            if length < 0 or len(place) != HEADER_BYTES + length:
                raise KvtideError("a fetch beyond its share")
        statuses = self._store.get_into(request.keys, [place[HEADER_BYTES:] for place in places])
        numbers = [next(self._numbers) for _ in statuses]
        for key, place, status, number in zip(request.keys, places, statuses, numbers, strict=True):
            if status is Status.HIT:
                payload = place[HEADER_BYTES:]
                place[:HEADER_BYTES] = make_header(key, payload, raw_bytes=payload.nbytes, generation=number)
        return Answer(statuses=[int(status) for status in statuses], numbers=numbers)


def _plain(head: Header | None) -> tuple[int, int, int, int, bytes, bytes] | None:
    return None if head is None else (*head,)
