"""A store for kvtide in one SQLite file: the example of the page "Add a store", run by the conformance suite."""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta

from kvtide.connectors.base import BaseConnector
from kvtide.connectors.settings import CodecName, StoreConfig
from kvtide.kvcache import ConfigError
from kvtide.offload.keys import StoreKey
from kvtide.offload.store import Entry, Status
from kvtide.offload.values import HEADER_BYTES, Header


class SqliteConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `SqliteConnector`: the keys of kv_connector_extra_config."""

    path: Annotated[str, Meta(description="The database file; made if it is not there.", min_length=1)]
    codec: CodecName = "raw"


class SqliteConnector(BaseConnector):
    """Values as rows of one table."""

    Config = SqliteConfig
    name = "sqlite"
    max_value_bytes = 512 << 20  # SQLite's own bound on a row is about 1 GB

    def __init__(self, config: SqliteConfig) -> None:
        super().__init__(config.codec)
        self._lock = threading.Lock()  # calls come from several threads
        try:
            self._db = sqlite3.connect(config.path, check_same_thread=False)
            self._db.execute("CREATE TABLE IF NOT EXISTS kv (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
            self._db.commit()
        except sqlite3.Error as error:
            raise ConfigError(f"path {config.path!r} cannot be opened: {error}") from None

    def _contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        rows = self._rows("SELECT 1 FROM kv WHERE key = ?", keys)
        if rows is None:
            return [Status.ERROR] * len(keys)
        return [Status.HIT if row else Status.MISS for row in rows]

    def _get(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        rows = self._rows("SELECT value FROM kv WHERE key = ?", keys)
        if rows is None:
            return [Status.ERROR] * len(keys)
        statuses = [
            self._unseal(key, row[0], view) if row else Status.MISS
            for key, row, view in zip(keys, rows, views, strict=True)
        ]
        self._remove_corrupt(keys, statuses)
        return statuses

    def _put(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        values = [(key, b"".join(self._seal(key, view))) for key, view in zip(keys, views, strict=True)]
        return self._write("INSERT OR IGNORE INTO kv VALUES (?, ?)", values, Status.STORED, Status.PRESENT)

    def _delete(self, keys: Sequence[StoreKey]) -> list[Status]:
        return self._write("DELETE FROM kv WHERE key = ?", [(key,) for key in keys], Status.DELETED, Status.MISS)

    def _headers(self, keys: Sequence[StoreKey]) -> list[Header | None]:
        rows = self._rows(f"SELECT substr(value, 1, {HEADER_BYTES}) FROM kv WHERE key = ?", keys)
        if rows is None:
            return [None] * len(keys)
        return [self._header(key, row[0]) if row else None for key, row in zip(keys, rows, strict=True)]

    def scan(self) -> Iterator[Entry]:
        after = b""
        while self._enter():  # False once the store is closed
            try:
                with self._lock:
                    query = "SELECT key, length(value) FROM kv WHERE key > ? ORDER BY key LIMIT 1000"
                    found = self._db.execute(query, (after,)).fetchall()
            except sqlite3.Error as error:
                self._fault(type(error).__name__.lower())
                return
            finally:
                self._leave()
            yield from (Entry(*row) for row in found)
            if not found:
                return
            after = found[-1][0]

    def stats(self):
        stats = super().stats()
        for entry in self.scan():
            stats.num_values += 1
            stats.num_bytes += entry.num_bytes
        return stats

    def _shut(self) -> None:
        self._db.close()

    def _rows(self, query: str, keys: Sequence[StoreKey]) -> list | None:
        try:
            with self._lock:
                return [self._db.execute(query, (key,)).fetchone() for key in keys]
        except sqlite3.Error as error:
            self._fault(type(error).__name__.lower(), len(keys))
            return None

    def _write(self, statement: str, rows: list, done: Status, not_done: Status) -> list[Status]:
        """One transaction: all rows are written, or none."""
        try:
            with self._lock, self._db:
                return [done if self._db.execute(statement, row).rowcount else not_done for row in rows]
        except sqlite3.Error as error:
            self._fault(type(error).__name__.lower(), len(rows))
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            return [Status.FULL if full and done is Status.STORED else Status.ERROR] * len(rows)
