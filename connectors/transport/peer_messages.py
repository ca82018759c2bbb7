"""What `NixlPeerConnector` and `PeerServer` say to each other: 4 bytes of length, then one message as MessagePack.

Requests are told apart by their tag; one answer type has a field for what each of them asks. A message is at most
`MOST_BYTES`, which is checked before anything is allocated.
"""

from __future__ import annotations

import socket
import struct

import msgspec

MOST_BYTES = 16 << 20
_LENGTH = struct.Struct("<I")


class Request(msgspec.Struct, tag=True, frozen=True):
    """Base of the requests."""


class Hello(Request, frozen=True):
    """Who are you, and where is my share? With a secret, see `peer_secret`."""

    nonce: bytes = b""
    proof: bytes = b""


class Contains(Request, frozen=True):
    """Which of these are there? `statuses`."""

    keys: list[bytes]


class Fetch(Request, frozen=True):
    """Put these values, of these lengths, at these places of my share: `statuses` and `numbers`."""

    keys: list[bytes]
    lengths: list[int]
    offsets: list[int]


class Heads(Request, frozen=True):
    """The values' headers: `heads`."""

    keys: list[bytes]


class Scan(Request, frozen=True):
    """The next `most` values after this key, in the keys' order: `entries`."""

    after: bytes
    most: int


class Stats(Request, frozen=True):
    """How much do you hold? `counts`."""


AnyRequest = Hello | Contains | Fetch | Heads | Scan | Stats


class Answer(msgspec.Struct, frozen=True):
    """What was asked for; a `Hello` that finds no share free is answered without metadata.

    One that has yet to prove the secret gets a `nonce`, one whose proof is wrong gets `refused`.
    """

    agent: str = ""
    metadata: bytes = b""
    address: int = 0
    share_bytes: int = 0
    statuses: list[int] = []
    numbers: list[int] = []
    heads: list[tuple[int, int, int, int, bytes, bytes] | None] = []
    entries: list[tuple[bytes, int]] = []
    counts: tuple[int, int, int | None] = (0, 0, None)
    nonce: bytes = b""
    proof: bytes = b""
    refused: bool = False


_REQUESTS = msgspec.msgpack.Decoder(AnyRequest)
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def send(connection: socket.socket, message: Request | Answer) -> None:
    """Send a whole message; `OSError` where that cannot be."""
    data = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_request(connection: socket.socket) -> AnyRequest:
    """The next request; `OSError` (of which a time-out is one) or `msgspec.MsgspecError` where there is none."""
    return _REQUESTS.decode(_message(connection))


def receive_answer(connection: socket.socket) -> Answer:
    """The next answer; errors as for a request."""
    return _ANSWERS.decode(_message(connection))


def _message(connection: socket.socket) -> bytearray:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > MOST_BYTES:
        raise ConnectionError(f"a message of {length} bytes")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        read = connection.recv_into(view[done:])
        if not read:
            raise ConnectionError("the other side went")
        done += read
    return data
