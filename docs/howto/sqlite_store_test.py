"""The conformance suite on `SqliteConnector`; run it with pytest."""

import sqlite3

import pytest

pytest.register_assert_rewrite("kvtide.offload.conformance")
from sqlite_store import SqliteConfig, SqliteConnector  # noqa: E402

from kvtide.offload.conformance import StoreConformance  # noqa: E402


class TestSqlite(StoreConformance):
    """What `SqliteConnector` can do."""

    persistent = True  # values survive closing
    shared = True  # several may be open on one file

    def open_store(self, place):
        return SqliteConnector(SqliteConfig(path=str(place / "kv.db")))

    def stored(self, store, place, key):
        with sqlite3.connect(place / "kv.db") as db:
            return db.execute("SELECT value FROM kv WHERE key = ?", (key,)).fetchone()[0]

    def overwrite(self, store, place, key, data):
        with sqlite3.connect(place / "kv.db") as db:
            db.execute("UPDATE kv SET value = ? WHERE key = ?", (data, key))
