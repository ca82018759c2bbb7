"""RedisConnector: values in Redis or Valkey, one server or a cluster, shared by every engine that has the same prefix.

One value is one string, header and payload together, under `prefix` + the key in hex: whatever the server evicts or
expires, it takes away whole, and the value is a MISS. Commands of a batch travel in pipelines of about 8 MiB. The
server decides what it keeps: set its `maxmemory` and an eviction policy such as `allkeys-lru`; without one, what does
not fit is FULL. A server that cannot be reached when the store is opened is no error of the configuration: the store
answers ERROR until it can be. `num_values` and `num_bytes` of the stats are the server's, all its users together.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from msgspec import Meta

from kvtide.kvcache import ConfigError, MissingExtra
from kvtide.offload.keys import StoreKey
from kvtide.offload.store import Entry, Status, StoreStats
from kvtide.offload.values import HEADER_BYTES, Header

from .base import BaseConnector, key_of, present
from .settings import CodecName, StoreConfig, secret

STRING_LIMIT = 512 << 20  # of the server
_BATCH_BYTES = 8 << 20  # of one pipeline: held in memory beside the caller's buffers
_BATCH_KEYS = 1024
_READ_BYTES = 1 << 20  # of one recv: up to twice as fast as the client's own 32 KiB


Command = Callable[[Any, int], Any]


class RedisConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a `RedisConnector`."""

    url: Annotated[
        str,
        Meta(
            description="redis://host:6379/0, rediss://host:6379 for TLS, or unix:///run/redis.sock. A password in it "
            "is never printed; password_env or password_file keep it out of the file.",
            pattern="^(redis|rediss|unix)://",
        ),
    ]
    cluster: Annotated[bool, Meta(description="The server is one node of a cluster; the others are found from it.")] = (
        False
    )
    prefix: Annotated[
        str,
        Meta(description="What the names of all values begin with.", pattern="^[A-Za-z0-9_.:/-]*$", max_length=200),
    ] = "kvtide:"
    username: Annotated[str | None, Meta(description="User name (ACL); the default user when absent.")] = None
    password_env: Annotated[str | None, Meta(description="Environment variable that holds the password.")] = None
    password_file: Annotated[str | None, Meta(description="File that holds the password, and nothing else.")] = None
    tls_ca_file: Annotated[
        str | None,
        Meta(description="Certificates (PEM) that the server's is checked against; the system's when absent."),
    ] = None
    ttl_seconds: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Values are forgotten this long after they were stored.")
    ] = None
    codec: CodecName = "raw"
    timeout_seconds: Annotated[
        float, Meta(description="A connection or an answer that takes longer is an error.", gt=0, le=600)
    ] = 5.0

    def __repr__(self) -> str:
        return f"RedisConfig(url={_shown(self.url)!r}, cluster={self.cluster}, prefix={self.prefix!r})"


class RedisConnector(BaseConnector):
    """The store; see the module. Raises `ConfigError` when opened with credentials that the server refuses."""

    Config = RedisConfig
    name = "redis"
    max_value_bytes = STRING_LIMIT - HEADER_BYTES

    def __init__(self, config: RedisConfig) -> None:
        super().__init__(config.codec)
        self._prefix = config.prefix
        self._ttl = config.ttl_seconds
        self._redis = _package()
        self._faults = (self._redis.RedisError, self._redis.exceptions.RedisClusterException, OSError)
        self._moved = (
            self._redis.exceptions.AskError,  # of which MOVED is one
            self._redis.exceptions.TryAgainError,
        )
        self._stale = False
        self._open = _opener(self._redis, config)
        self._clustered = config.cluster
        self._opening = threading.Lock()
        self._client: Any = None
        self._evicted_before: int | None = None
        try:
            self._evicted_before = self._server_counts()[3]
        except (self._redis.AuthenticationError, self._redis.exceptions.NoPermissionError) as error:
            self._shut()
            raise ConfigError(
                f"url {_shown(config.url)!r}: the server refuses the username or password: {error}"
            ) from None
        except self._faults as error:
            self._fault_of(error)

    def scan(self) -> Iterator[Entry]:
        if not self._enter():
            return
        try:
            found = self._connected().scan_iter(match=f"{self._prefix}*", count=_BATCH_KEYS)
            while batch := list(islice(found, _BATCH_KEYS)):
                yield from self._entries([name.decode("ascii", "replace") for name in batch])
        except self._faults as error:
            self._fault_of(error)
        finally:
            self._leave()

    def _entries(self, names: Sequence[str]) -> Iterator[Entry]:
        lengths = self._ask(names, lambda pipe, at: pipe.strlen(names[at]))
        for name, length in zip(names, lengths, strict=True):
            key = key_of(name.removeprefix(self._prefix))
            if key is not None and isinstance(length, int) and length > 0:
                yield Entry(key, length)

    def stats(self) -> StoreStats:
        stats = super().stats()
        if self._enter():
            try:
                stats.num_values, stats.num_bytes, stats.capacity_bytes, evicted = self._server_counts()
                if self._evicted_before is None:
                    self._evicted_before = evicted
                stats.evicted = max(0, evicted - self._evicted_before)  # less than before: the server was restarted
            except self._faults as error:
                self._fault_of(error)
            finally:
                self._leave()
        return stats

    def _contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        names = self._names(keys)
        found = self._ask(names, lambda pipe, at: pipe.exists(names[at]))
        return [self._status(answer, {0: Status.MISS, 1: Status.HIT}) for answer in found]

    def _get(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        names = self._names(keys)
        values = self._ask(names, lambda pipe, at: pipe.get(names[at]), [view.nbytes for view in views])
        statuses = []
        for key, view, value in zip(keys, views, values, strict=True):
            if isinstance(value, bytes):
                statuses.append(self._unseal(key, value, view))
            else:
                statuses.append(self._status(value, {None: Status.MISS}))
        self._remove_corrupt(keys, statuses)
        return statuses

    def _put(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        # What is there already is not sent again; NX settles it when two clients store one key at once.
        statuses = present(self._contains(keys))
        absent = [at for at, status in enumerate(statuses) if status is Status.MISS]

        names = self._names([keys[at] for at in absent])

        def command(pipe: Any, at: int) -> None:
            value = b"".join(self._seal(keys[absent[at]], views[absent[at]]))
            pipe.set(names[at], value, nx=True, ex=self._ttl)

        answers = self._ask(names, command, [views[at].nbytes for at in absent])
        for at, answer in zip(absent, answers, strict=True):
            if isinstance(answer, self._redis.OutOfMemoryError):
                statuses[at] = Status.FULL
            else:
                statuses[at] = self._status(answer, {True: Status.STORED, None: Status.PRESENT})
        return statuses

    def _delete(self, keys: Sequence[StoreKey]) -> list[Status]:
        names = self._names(keys)
        gone = self._ask(names, lambda pipe, at: pipe.unlink(names[at]))
        return [self._status(answer, {0: Status.MISS, 1: Status.DELETED}) for answer in gone]

    def _headers(self, keys: Sequence[StoreKey]) -> list[Header | None]:
        names = self._names(keys)
        starts = self._ask(names, lambda pipe, at: pipe.getrange(names[at], 0, HEADER_BYTES - 1))
        return [
            self._header(key, start) if isinstance(start, bytes) else None
            for key, start in zip(keys, starts, strict=True)
        ]

    def _shut(self) -> None:
        if self._client is not None:
            if self._clustered:  # whose client keeps connections of nodes that it has replaced
                for node in (*self._client.get_nodes(), *self._client.nodes_manager.startup_nodes.values()):
                    if node.redis_connection is not None:
                        node.redis_connection.connection_pool.disconnect()
            self._client.close()

    def _names(self, keys: Sequence[StoreKey]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    def _connected(self) -> Any:
        # A cluster's client asks a node for the others when it is made, so it is made when a node first answers.
        with self._opening:
            if self._client is None:
                self._client = self._open()
            return self._client

    def _ask(self, names: Sequence[str], command: Command, sizes: Sequence[int] | None = None) -> Iterator[Any]:
        """What the server says to `command(pipe, at)` for each name, in order: a result, or the exception in its stead.

        Asks as the answers are consumed, in parts bounded by `sizes`; a node that fails is not asked again.
        """
        lost: dict[Any, Exception] = {}
        for part in _parts(sizes or [0] * len(names)):
            answers: dict[int, Any] = {}
            try:
                client = self._connected()
                nodes = self._by_node(client, names, part)
            except self._faults as error:
                nodes, answers = {}, dict.fromkeys(part, error)
            for node, places in nodes.items():
                if node not in lost:
                    try:
                        server = client if node is None else client.get_redis_connection(node)
                        answers.update(zip(places, _piped(server, command, places), strict=True))
                        continue
                    except self._faults as error:
                        lost[node] = error
                        self._stale = self._clustered
                answers.update(dict.fromkeys(places, lost[node]))
            moved = [at for at, answer in answers.items() if isinstance(answer, self._moved)]
            if moved:  # the cluster's own pipeline follows redirections, and learns from them
                try:
                    answers.update(zip(moved, _piped(client, command, moved), strict=True))
                except self._faults as error:
                    answers.update(dict.fromkeys(moved, error))
            yield from (answers[at] for at in part)

    def _by_node(self, client: Any, names: Sequence[str], part: range) -> dict[Any, list[int]]:
        """The places of `part` by the node of the cluster that serves them; all under None without a cluster."""
        if not self._clustered:
            return {None: list(part)}
        if self._stale:
            self._stale = False
            client.nodes_manager.initialize()  # a replica may have taken a lost node's place
        nodes: dict[Any, list[int]] = {}
        for at in part:
            nodes.setdefault(client.get_node_from_key(names[at]), []).append(at)
        return nodes

    def _status(self, answer: Any, meanings: dict[Any, Status]) -> Status:
        if not isinstance(answer, Exception) and answer in meanings:
            return meanings[answer]
        self._fault_of(answer)
        return Status.ERROR

    def _fault_of(self, error: Any) -> None:
        kinds = {
            "timeout": self._redis.TimeoutError,
            "credentials": (self._redis.AuthenticationError, self._redis.exceptions.NoPermissionError),
            "connection": (self._redis.ConnectionError, OSError),
        }
        self._fault(next((kind for kind, types in kinds.items() if isinstance(error, types)), "server"))

    def _server_counts(self) -> tuple[int, int, int | None, int]:
        """Values, their bytes, most bytes, and values evicted so far: of the server, or of a cluster's primaries."""
        client = self._connected()
        nodes = client.info(target_nodes="primaries").values() if self._clustered else [client.info()]
        if self._clustered and isinstance(next(iter(nodes), None), int):
            nodes = [client.info(target_nodes="primaries")]  # a cluster of one node answers without the node's name
        keys = sum(part["keys"] for node in nodes for name, part in node.items() if re.fullmatch(r"db\d+", name))
        used = sum(max(0, node["used_memory"] - node["used_memory_startup"]) for node in nodes)
        most = sum(node["maxmemory"] for node in nodes)
        return keys, used, most or None, sum(node["evicted_keys"] for node in nodes)


def _package() -> Any:
    try:
        import redis
    except ImportError:
        raise MissingExtra("RedisConnector", "redis", "redis") from None
    return redis


def _opener(redis: Any, config: RedisConfig) -> Callable[[], Any]:
    """What makes the client; nothing of it connects yet. `ConfigError` for settings that contradict each other."""
    options: dict[str, Any] = {
        "socket_timeout": config.timeout_seconds,
        "socket_connect_timeout": config.timeout_seconds,
        "socket_read_size": _READ_BYTES,
        # A pooled connection that a restarted server dropped is made anew, once; a time-out is not waited out again.
        "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
    }
    url = urlsplit(config.url)
    password = secret("password", config.password_env, config.password_file)
    if password is not None:
        if url.password:
            raise ConfigError(
                f"url {_shown(config.url)!r} holds a password, so password_env and password_file must not be given"
            )
        options["password"] = password
    if config.username is not None:
        options["username"] = config.username
    if config.tls_ca_file is not None:
        if url.scheme != "rediss":
            raise ConfigError(f"tls_ca_file needs a url that begins with rediss://, not {_shown(config.url)!r}")
        if not Path(config.tls_ca_file).is_file():
            raise ConfigError(f"tls_ca_file {config.tls_ca_file!r} is not a file")
        options["ssl_ca_certs"] = config.tls_ca_file
    if config.cluster and url.scheme == "unix":
        raise ConfigError("a cluster is reached by TCP: url must begin with redis:// or rediss:// when cluster is true")
    make = redis.RedisCluster.from_url if config.cluster else redis.Redis.from_url
    try:
        redis.connection.parse_url(config.url)
    except ValueError as error:
        raise ConfigError(f"url {_shown(config.url)!r}: {error}") from None
    return lambda: make(config.url, **options)


def _shown(url: str) -> str:
    """The URL without its password."""
    return re.sub(r"//[^/@]*@", "//***@", url)


def _piped(server: Any, command: Command, places: Sequence[int]) -> list[Any]:
    with server.pipeline(transaction=False) as pipe:
        for at in places:
            command(pipe, at)
        answers: list[Any] = pipe.execute(raise_on_error=False)
        return answers


def _parts(sizes: Sequence[int]) -> Iterator[range]:
    """Consecutive places, of at most `_BATCH_KEYS` items and about `_BATCH_BYTES`."""
    start, held = 0, 0
    for at, size in enumerate(sizes):
        if at > start and (held + size > _BATCH_BYTES or at - start == _BATCH_KEYS):
            yield range(start, at)
            start, held = at, 0
        held += size
    if start < len(sizes):
        yield range(start, len(sizes))
