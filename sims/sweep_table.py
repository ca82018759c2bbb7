"""The results of a sweep as a file: CSV, or Parquet with the `parquet` extra."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from kvtide.kvcache import ConfigError, MissingExtra

SUFFIXES = (".csv", ".parquet")


def check_table(path: Path) -> None:
    """`ConfigError` for another suffix, `MissingExtra` without what writes the format."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"results {str(path)!r} must end with one of {', '.join(SUFFIXES)}")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise MissingExtra("a Parquet file", "pyarrow", "parquet")


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with equal keys; the file is there whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as temporary:
        whole = Path(temporary.name)
        try:
            if path.suffix == ".parquet":
                _write_parquet(temporary.file, rows)
            else:
                temporary.write(_csv(rows).encode())
            temporary.close()
            whole.chmod(0o644)
            whole.replace(path)
        except BaseException:
            whole.unlink(missing_ok=True)
            raise


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    with tempfile.TemporaryFile("w+", newline="") as text:
        writer = csv.DictWriter(text, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
        text.seek(0)
        return text.read()


def _write_parquet(file: IO[bytes], rows: Sequence[Mapping[str, Any]]) -> None:
    table = import_module("pyarrow").Table.from_pylist([dict(row) for row in rows])
    import_module("pyarrow.parquet").write_table(table, file)
