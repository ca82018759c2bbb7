"""S3Connector: values as objects of an S3-compatible service (AWS, MinIO, Ceph, R2 and others), shared by its clients.

One value is one object, header and payload together, under `prefix` + the key in hex. An object is there whole or not
at all: a PUT is atomic, and so is the completion of a multipart upload, which carries what is larger than
`multipart_bytes`; one that fails is aborted, and `gc` aborts those that dead writers left. Two writers of a key are
told apart by If-None-Match where the service has it. Keys of a batch travel side by side on `threads` threads; when the
service does not answer one, the others of the batch that still wait are not asked. Credentials come from the SDK's own
chain: environment, shared files, instance role. Objects are not bounded here: use the bucket's lifecycle rules.
`num_values` and `num_bytes` of the stats are what the last whole `scan` found: S3 does not count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from kvtide.kvcache import ConfigError, MissingExtra
from kvtide.offload.keys import StoreKey
from kvtide.offload.store import Entry, Status
from kvtide.offload.values import HEADER_BYTES, Header

from .base import BaseConnector, key_of
from .settings import CodecName, StoreConfig

_DELETED_AT_ONCE = 1000
_ABANDONED = timedelta(hours=24)  # no upload of a value takes this long
_ABSENT = {"NoSuchKey", "404", "InvalidRange", "416"}  # the last two: a range of an object of no bytes
_NOT_IMPLEMENTED = {"NotImplemented", "501"}
_NO_ROOM = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "507"}
_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "403", "401"}

Item = TypeVar("Item")
Result = TypeVar("Result")


HttpUrl = Annotated[str, Meta(pattern="^https?://")]


class S3Config(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an `S3Connector`."""

    sizes = ("multipart_bytes",)
    least = MappingProxyType({"multipart_bytes": "5MiB"})  # of a part of an upload, by the service's rules

    bucket: Annotated[str, Meta(description="The bucket; it must exist.", min_length=1)]
    prefix: Annotated[
        str,
        Meta(description="What the names of all values begin with.", pattern="^[A-Za-z0-9_.:/-]*$", max_length=200),
    ] = "kvtide/"
    endpoint_url: Annotated[
        HttpUrl | None, Meta(description="The service, such as http://minio:9000; AWS when absent.")
    ] = None
    region: Annotated[str | None, Meta(description="The region; from the SDK's configuration when absent.")] = None
    addressing: Annotated[
        Literal["auto", "path", "virtual"],
        Meta(description="Whether the bucket is in the path of URLs or in the host name."),
    ] = "auto"
    multipart_bytes: Annotated[
        int | str, Meta(description="Values larger than this travel in parts of this size; at least 5MiB.")
    ] = "32MiB"
    codec: CodecName = "raw"
    threads: Annotated[int, Meta(description="Requests at a time.", ge=1, le=256)] = 16
    timeout_seconds: Annotated[
        float, Meta(description="A connection, or a silence in an answer, that lasts longer fails.", gt=0, le=600)
    ] = 10.0
    retries: Annotated[int, Meta(description="How often a request that failed is tried again.", ge=0, le=10)] = 1


class S3Connector(BaseConnector):
    """The store; see the module. Raises `ConfigError` for a bucket that is not there or may not be used."""

    Config = S3Config
    name = "s3"

    def __init__(self, config: S3Config) -> None:
        super().__init__(config.codec)
        self._names = _package("botocore.exceptions")
        self._bucket = config.bucket
        self._prefix = config.prefix
        self._part_bytes = config.num_bytes("multipart_bytes")
        self._conditional = True
        self._errors = (self._names.BotoCoreError, self._names.ClientError, OSError)
        self._client: Any = _client(config)
        self._check_bucket(config)
        self._pool = ThreadPoolExecutor(config.threads, thread_name_prefix="kvtide-s3")

    def scan(self) -> Iterator[Entry]:
        if not self._enter():
            return
        try:
            yield from self._counted(self._listed())
        except self._errors as error:
            self._fault_of(error)
        finally:
            self._leave()

    def _listed(self) -> Iterator[Entry]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        for page in pages:
            for found in page.get("Contents", ()):
                key = key_of(found["Key"].removeprefix(self._prefix))
                if key is not None:
                    yield Entry(key, found["Size"])

    def gc(self) -> int:
        """Abort multipart uploads that began more than a day ago; the bytes of their parts."""
        given_back = 0
        if not self._enter():
            return 0
        try:
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            )
            for upload in [upload for page in pages for upload in page.get("Uploads", ())]:
                if datetime.now(UTC) - upload["Initiated"] > _ABANDONED:
                    which = {"Bucket": self._bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                    parts = self._client.get_paginator("list_parts").paginate(**which)
                    given_back += sum(part["Size"] for page in parts for part in page.get("Parts", ()))
                    self._client.abort_multipart_upload(**which)
        except self._errors as error:
            self._fault_of(error)
        finally:
            self._leave()
        return given_back

    @property
    def region(self) -> str:
        """The region that requests name."""
        return str(self._client.meta.region_name)

    def sizes(self, keys: Sequence[StoreKey]) -> list[int | Exception | None]:
        """Bytes of each object, header included; None where there is none; an exception where it is not known."""
        return self._found(keys, lambda key: int(self._client.head_object(**self._object(key))["ContentLength"]))

    def starts(self, keys: Sequence[StoreKey]) -> list[bytes | None]:
        """The first bytes of each object, as many as a header has; None where there is no object, or no answer."""

        def start(key: StoreKey) -> bytes:
            found = self._client.get_object(**self._object(key), Range=f"bytes=0-{HEADER_BYTES - 1}")
            with found["Body"] as body:
                return bytes(body.read())

        return [None if isinstance(found, Exception) else found for found in self._found(keys, start)]

    def object_name(self, key: StoreKey) -> str:
        """What the object of a key is called in the bucket."""
        return self._prefix + key.hex()

    def _contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        return self._each(keys, self._look)

    def _look(self, key: StoreKey) -> Status:
        self._client.head_object(**self._object(key))
        return Status.HIT

    def _get(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        statuses = self._each(list(zip(keys, views, strict=True)), lambda item: self._read(*item))
        self._remove_corrupt(keys, statuses)
        return statuses

    def _read(self, key: StoreKey, view: memoryview) -> Status:
        found = self._client.get_object(**self._object(key))
        with found["Body"] as body:
            if "ContentLength" not in found:
                raise ConnectionError("the answer's headers ended early")
            return self._unseal_stream(key, body.readinto, found["ContentLength"], view)

    def _put(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        return self._each(list(zip(keys, views, strict=True)), lambda item: self._write(*item))

    def _write(self, key: StoreKey, view: memoryview) -> Status:
        # Asking first spares sending what is there, and serves where If-None-Match does not.
        try:
            self._look(key)
        except self._names.ClientError as error:
            if _code(error) not in _ABSENT:
                raise
        else:
            return Status.PRESENT
        value = b"".join(self._seal(key, view))
        try:
            self._send(key, memoryview(value))
        except self._names.ClientError as error:
            code = _code(error)
            if code in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409"):
                return Status.PRESENT
            if code in _NO_ROOM:
                return Status.FULL
            raise
        return Status.STORED

    def _send(self, key: StoreKey, value: memoryview) -> None:
        send = self._send_whole if value.nbytes <= self._part_bytes else self._send_parts
        try:
            send(key, value, {"IfNoneMatch": "*"} if self._conditional else {})
        except self._names.ClientError as error:
            if not self._conditional or _code(error) not in _NOT_IMPLEMENTED:
                raise
            self._conditional = False
            send(key, value, {})

    def _send_whole(self, key: StoreKey, value: memoryview, condition: dict[str, str]) -> None:
        self._client.put_object(**self._object(key), **condition, Body=value.obj)

    def _send_parts(self, key: StoreKey, value: memoryview, condition: dict[str, str]) -> None:
        upload = {
            **self._object(key),
            "UploadId": self._client.create_multipart_upload(**self._object(key))["UploadId"],
        }
        try:
            parts = []
            for number, start in enumerate(range(0, value.nbytes, self._part_bytes), 1):
                body = bytes(value[start : start + self._part_bytes])
                tag = self._client.upload_part(**upload, PartNumber=number, Body=body)["ETag"]
                parts.append({"PartNumber": number, "ETag": tag})
            self._client.complete_multipart_upload(**upload, **condition, MultipartUpload={"Parts": parts})
        except BaseException:
            with suppress(*self._errors):  # the first error tells more; `gc` finds what is left
                self._client.abort_multipart_upload(**upload)
            raise

    def _delete(self, keys: Sequence[StoreKey]) -> list[Status]:
        # The service deletes what is not there without saying so: look first.
        statuses = self._contains(keys)
        there = [at for at, status in enumerate(statuses) if status is Status.HIT]
        for start in range(0, len(there), _DELETED_AT_ONCE):
            part = there[start : start + _DELETED_AT_ONCE]
            names = {self.object_name(keys[at]): at for at in part}
            statuses_of_part = dict.fromkeys(part, Status.DELETED)
            try:
                answer = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": [{"Key": name} for name in names], "Quiet": True}
                )
                for refused in answer.get("Errors", ()):
                    self._fault("server")
                    statuses_of_part[names[refused["Key"]]] = Status.ERROR
            except self._errors as error:
                self._fault_of(error, len(part))
                statuses_of_part = dict.fromkeys(part, Status.ERROR)
            for at, status in statuses_of_part.items():
                statuses[at] = status
        return statuses

    def _headers(self, keys: Sequence[StoreKey]) -> list[Header | None]:
        return [
            None if start is None else self._header(key, start)
            for key, start in zip(keys, self.starts(keys), strict=True)
        ]

    def _shut(self) -> None:
        self._pool.shutdown()
        self._client.close()

    def _object(self, key: StoreKey) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self.object_name(key)}

    def _found(self, keys: Sequence[StoreKey], ask: Callable[[StoreKey], Result]) -> list[Result | Exception | None]:
        found: list[Result | Exception | None] = [None] * len(keys)

        def note(at: int) -> Status:
            found[at] = ask(keys[at])
            return Status.HIT

        for at, status in enumerate(self._each(range(len(keys)), note)):
            if status is Status.ERROR:
                found[at] = ConnectionError("no answer")
        return found

    def _each(self, items: Sequence[Item], call: Callable[[Item], Status]) -> list[Status]:
        """`call`'s answer for every item, side by side; ERROR at once for what begins after one was not answered."""
        silent = threading.Event()

        def answer(item: Item) -> Status:
            if silent.is_set():
                self._fault("not asked")
                return Status.ERROR
            return self._outcome(call, item, silent)

        return list(self._pool.map(answer, items))

    def _outcome(self, call: Callable[[Item], Status], item: Item, silent: threading.Event) -> Status:
        try:
            return call(item)
        except self._errors as error:
            answered = isinstance(error, self._names.ClientError)
            if answered and _code(error) in _ABSENT:
                return Status.MISS
            if not answered:
                silent.set()
            self._fault_of(error)
            return Status.ERROR

    def _fault_of(self, error: Exception, count: int = 1) -> None:
        names = self._names
        if isinstance(error, names.ClientError):
            code = _code(error)
            kind = "credentials" if code in _DENIED else "throttled" if code in ("SlowDown", "503") else "server"
        elif isinstance(error, names.ReadTimeoutError | names.ConnectTimeoutError):
            kind = "timeout"
        else:
            kind = "connection"
        self._fault(kind, count)

    def _check_bucket(self, config: S3Config) -> None:
        names = self._names
        try:
            self._client.head_bucket(Bucket=self._bucket)
        except names.ParamValidationError:
            raise ConfigError(f"bucket {self._bucket!r} cannot be a bucket's name") from None
        except names.NoCredentialsError:
            raise ConfigError(
                "S3Connector finds no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
            ) from None
        except names.ClientError as error:
            code = _code(error)
            if code in ("404", "NoSuchBucket"):
                raise ConfigError(f"bucket {self._bucket!r} is not there; create it first") from None
            if code in _DENIED:
                raise ConfigError(f"bucket {self._bucket!r}: the service refuses the credentials") from None
            self._fault_of(error)
        except self._errors as error:
            self._fault_of(error)


def _client(config: S3Config) -> Any:
    boto3 = _package("boto3")
    settings = _package("botocore.config").Config(
        connect_timeout=config.timeout_seconds,
        read_timeout=config.timeout_seconds,
        retries={"total_max_attempts": 1 + config.retries, "mode": "standard"},
        max_pool_connections=config.threads,
        s3={"addressing_style": config.addressing},
        # The value's own checksum is stronger, and not every service knows the SDK's.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = boto3.session.Session(region_name=config.region)
    if config.region is None and session.region_name is None:
        session = boto3.session.Session(region_name="us-east-1")  # other services than AWS need no region
    try:
        return session.client("s3", endpoint_url=config.endpoint_url, config=settings)
    except ValueError as error:
        raise ConfigError(f"endpoint_url {config.endpoint_url!r}: {error}") from None


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise MissingExtra("S3Connector", "boto3", "s3") from None


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
