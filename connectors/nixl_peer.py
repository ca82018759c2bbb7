"""NixlPeerConnector: reads what another engine's store holds, by NIXL's UCX: RDMA where there is, shared memory or TCP.

    reader                                          serving engine (`nixl_server.PeerServer`)
      hello                            ──TCP──►     its agent's metadata, and a share of registered memory
      fetch(keys, lengths)             ──TCP──►     values copied from its store into the share, headers with a number
      READ share -> a lane's memory    ──UCX──      checked: key, number, checksum; then copied to the caller

Every lane has a connection, an agent and a share of its own, so that nothing is shared between calls but the peer. A
share is written only for its reader's next fetch. When the peer dies in a transfer, the lane holds torn bytes and NIXL
refuses its agent until it is added anew: the call answers ERROR, and the next one connects again. The store is
read-only: a put is REFUSED. The peer is trusted, and its port is for the network of the engines only.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvtide.kvcache import ConfigError
from kvtide.offload.keys import StoreKey
from kvtide.offload.store import Entry, Status, StoreStats
from kvtide.offload.values import HEADER_BYTES, BadValue, Header, parse_header

from .base import BaseConnector
from .settings import StoreConfig, secret
from .transport.lanes import Lane, Lanes, parts
from .transport.nixl_agent import Agent, Piece
from .transport.peer_messages import Answer, Contains, Fetch, Heads, Hello, Request, Scan, Stats, receive_answer, send
from .transport.peer_secret import is_proof, make_nonce, make_proof

PAGE_OF_ENTRIES = 10_000


class NixlPeerConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a `NixlPeerConnector`."""

    sizes = ("lane_bytes",)
    least = MappingProxyType({"lane_bytes": "8KiB"})

    address: Annotated[
        str,
        Meta(description="host:port that the peer serves on.", pattern=r"^(\[[0-9a-fA-F:.]+\]|[^:\s]+):[0-9]{1,5}$"),
    ]
    secret_env: Annotated[
        str | None, Meta(description="Environment variable that holds the secret which the peer's readers must have.")
    ] = None
    secret_file: Annotated[str | None, Meta(description="File that holds the secret, and nothing else.")] = None
    package: Annotated[
        Literal["nixl", "nixl_cu12", "nixl_cu13"], Meta(description="NIXL's build; nixl chooses by the CUDA it finds.")
    ] = "nixl"
    lanes: Annotated[int, Meta(description="Calls at a time, each with a connection and memory.", ge=1, le=64)] = 1
    lane_bytes: Annotated[
        int | str, Meta(description="Memory of one call, registered; no value is longer. At least 8KiB.")
    ] = "64MiB"
    timeout_seconds: Annotated[
        float, Meta(description="A connection, an answer or a transfer that takes longer is an error.", gt=0, le=600)
    ] = 10.0


class Lost(Exception):
    """The peer cannot be reached, or went; the text says for counters how."""


class Peer:
    """One lane's connection, used on its thread only."""

    def __init__(self, config: NixlPeerConfig, lane: Lane) -> None:
        self._config = config
        self._secret = secret("secret", config.secret_env, config.secret_file)
        self._agent = Agent("UCX", {}, "DRAM", config.package)
        self._agent.register(lane.address, len(lane.memory))
        self._socket: socket.socket | None = None
        self._hello = Answer()

    def ask(self, request: Request) -> Answer:
        """The peer's answer. A connection that the peer has dropped since it was last used is made anew, once."""
        if self._socket is not None:
            try:
                return self._exchange(request)
            except Lost as error:
                if str(error) == "timeout":
                    raise
        self._connect()
        return self._exchange(request)

    def read(self, request: Fetch, pieces: Sequence[Piece]) -> tuple[Answer, list[Exception | None]]:
        """Have values put into the share, and read those that are there; `place` of a piece is one in the share."""
        answer = self.ask(request)
        there = [at for at, status in enumerate(answer.statuses) if status == Status.HIT]
        moved = [pieces[at]._replace(place=self._hello.address + pieces[at].place) for at in there]
        errors: list[Exception | None] = [None] * len(pieces)
        for at, error in zip(there, self._agent.move("READ", moved, self._hello.agent), strict=True):
            errors[at] = error
        if any(error is not None for error in errors):
            self.drop()
        return answer, errors

    def share_bytes(self) -> int:
        """How much the peer gives at a time."""
        if self._socket is None:
            self._connect()
        return self._hello.share_bytes

    def drop(self) -> None:
        """Forget the peer; it is greeted anew when it is next asked."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._hello.agent:
            self._agent.forget(self._hello.agent)
            self._hello = Answer()

    def close(self) -> None:
        """Drop the peer, and end the agent."""
        self.drop()
        self._agent.close()

    def _connect(self) -> None:
        self.drop()
        host, _, port = self._config.address.rpartition(":")
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), self._config.timeout_seconds)
        except OSError as error:
            raise Lost("timeout" if isinstance(error, TimeoutError) else "connection") from None
        self._hello = self._greet()
        if not self._hello.metadata:
            self.drop()
            raise Lost("peer is busy")
        self._agent.meet(self._hello.metadata)

    def _greet(self) -> Answer:
        nonce = make_nonce()
        answer = self._exchange(Hello(nonce=nonce))
        if self._secret is None:
            problem = "peer wants a secret" if answer.nonce else ""
        elif not answer.nonce:
            problem = "peer has no secret"
        else:
            mine = make_proof(self._secret, "reader", answer.nonce, nonce)
            server_nonce = answer.nonce
            answer = self._exchange(Hello(nonce=nonce, proof=mine))
            has_it = is_proof(answer.proof, self._secret, "server", server_nonce, nonce)
            problem = "" if has_it else "peer has another secret"
        if problem:
            self.drop()
            raise Lost(problem)
        return answer

    def _exchange(self, request: Request) -> Answer:
        assert self._socket is not None
        try:
            send(self._socket, request)
            return receive_answer(self._socket)
        except (OSError, msgspec.MsgspecError) as error:
            self.drop()
            raise Lost("timeout" if isinstance(error, TimeoutError) else "connection") from None


class NixlPeerConnector(BaseConnector):
    """The store; see the module. Raises `ConfigError` when UCX cannot be created; the peer may come later."""

    Config = NixlPeerConfig
    name = "nixl_peer"

    def __init__(self, config: NixlPeerConfig) -> None:
        super().__init__()
        self._lanes = Lanes(config.lanes, config.num_bytes("lane_bytes"), config.timeout_seconds, "kvtide-peer")
        self.max_value_bytes = self._lanes.max_value_bytes
        try:
            for lane in self._lanes.all:
                lane.context = lane.run(partial(Peer, config, lane))
        except TimeoutError:
            self._shut()
            raise ConfigError("UCX cannot be created within timeout_seconds") from None
        except BaseException:
            self._shut()
            raise

    def scan(self) -> Iterator[Entry]:
        if not self._enter():
            return
        try:
            after: bytes | None = b""
            while after is not None:
                answer = self._asked(Scan(after=after, most=PAGE_OF_ENTRIES))
                if answer is None:
                    return
                yield from (Entry(key, num_bytes) for key, num_bytes in answer.entries)
                after = answer.entries[-1][0] if len(answer.entries) == PAGE_OF_ENTRIES else None
        finally:
            self._leave()

    def stats(self) -> StoreStats:
        stats = super().stats()
        if self._enter():
            try:
                answer = self._asked(Stats())
                if answer is not None:
                    stats.num_values, stats.num_bytes, stats.capacity_bytes = answer.counts
            finally:
                self._leave()
        return stats

    def _contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        answer = self._asked(Contains(keys=list(keys)), len(keys))
        return [Status.ERROR] * len(keys) if answer is None else [Status(status) for status in answer.statuses]

    def _get(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        statuses = [Status.ERROR] * len(keys)
        try:
            with self._lanes.take() as lane:
                peer: Peer = lane.context
                room = min(self._lanes.lane_bytes, lane.run(peer.share_bytes))
                fits = [at for at, view in enumerate(views) if HEADER_BYTES + view.nbytes <= room]
                for part in parts([HEADER_BYTES + views[at].nbytes for at in fits], room):
                    self._read(lane, [(fits[number], offset) for number, offset in part], keys, views, statuses)
        except (TimeoutError, Lost) as error:
            self._fault("timeout" if isinstance(error, TimeoutError) else str(error), statuses.count(Status.ERROR))
        return statuses

    def _read(
        self,
        lane: Lane,
        part: Sequence[tuple[int, int]],
        keys: Sequence[StoreKey],
        views: Sequence[memoryview],
        statuses: list[Status],
    ) -> None:
        request = Fetch(
            keys=[keys[at] for at, _ in part],
            lengths=[views[at].nbytes for at, _ in part],
            offsets=[offset for _, offset in part],
        )
        pieces = [Piece(lane.address + offset, HEADER_BYTES + views[at].nbytes, offset, 0) for at, offset in part]
        answer, errors = lane.run(partial(lane.context.read, request, pieces))
        for (at, offset), status, error, number in zip(part, answer.statuses, errors, answer.numbers, strict=True):
            value = lane.memory[offset : offset + HEADER_BYTES + views[at].nbytes]
            if error is not None:
                self._fault(type(error).__name__)
            elif status != Status.HIT:
                statuses[at] = Status(status)
            else:
                statuses[at] = self._checked(keys[at], value, views[at], number)

    def _checked(self, key: StoreKey, value: memoryview, view: memoryview, number: int) -> Status:
        try:
            header = parse_header(value, key, max_value_bytes=self.max_value_bytes)
            if header.generation != number:
                raise BadValue("another generation")
        except BadValue as error:
            return self._bad(error)
        return self._unseal(key, value, view)

    def _put(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        return [Status.REFUSED] * len(keys)

    def _delete(self, keys: Sequence[StoreKey]) -> list[Status]:
        self._fault("read-only", len(keys))
        return [Status.ERROR] * len(keys)

    def _headers(self, keys: Sequence[StoreKey]) -> list[Header | None]:
        answer = self._asked(Heads(keys=list(keys)))
        return [None] * len(keys) if answer is None else [head and Header(*head) for head in answer.heads]

    def _shut(self) -> None:
        self._lanes.close(Peer.close)

    def _asked(self, request: Request, count: int = 1) -> Answer | None:
        try:
            with self._lanes.take() as lane:
                peer: Peer = lane.context
                return lane.run(partial(peer.ask, request))
        except (TimeoutError, Lost) as error:
            self._fault("timeout" if isinstance(error, TimeoutError) else str(error), count)
            return None
