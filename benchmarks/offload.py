"""What the stores cost: beside plain system calls on the same disk, and beside LMCache's adapters, in the same run.

    python benchmarks/offload.py [--quick] [--json FILE] [--path DIR] [--objects N] [--lmcache-python PATH]
                                 [--only PART]...

Times are per value (or batch), medians over repetitions in which the contestants take turns on the same disk (`--path`,
a new directory below the system's temporary one by default); a ratio is peer / kvtide. Batches hold 32 values.

    write, read      the LMDB store against `pwritev` and `preadv` of the same bytes into a preallocated file, with one
                     thread (the plain loop's own number) and with the store's default; in steady state: slots and
                     blocks were written before, and lie in the page cache
    strict write     the same with durability strict against one fdatasync of the plain file per batch
    checksum         what XXH3-128 takes of a read, for bytes that were just read
    inline           values in LMDB itself against segments with LMDB as their index, churn and file length too
    host             the host tier against memcpy of the same bytes, with one thread and with the store's default
    lookup           8,192 keys, in the writing process and in another one
    shared           the shared-storage store against the same plain file
    lmcache          `lmcache bench l2` of adapters fs and fs_native, run by the Python of `--lmcache-python` (or
                     `KVTIDE_LMCACHE_PYTHON`), against both stores; first writes of new values, as that tool does them
    metadata         `--objects` entries: bytes per object in the index and in memory, opening after closing, after a
                     kill, and with the index lost

Why values lie in segments (2 shared cores, ext4, page cache, no syncs): LMDB with the values in it puts and gets 64 KiB
in 0.5 and 0.3 of the time, unverified, but its files hold 1.2 times the data after churn at 64 KiB, 1.3 at 256 KiB and
2.0 at 1 MiB and more (segments 1.08, 1.04, 1.01), where puts and churn take it 1.2 times as long (1 MiB) and 2.8 times
(4 MiB). It has no bound that holds, and after a loss of power an unsynced LMDB is lost with all values in it, where
segments are read again from their headers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import click
import offload_host
import offload_lmcache
import offload_metadata
import offload_stores
from report import Figure, common_options, publish

Part = Callable[[offload_stores.Run], Iterator[Figure]]

PARTS: Mapping[str, Part] = {
    "plain": offload_stores.beside_system_calls,
    "inline": offload_stores.values_inline,
    "host": offload_host.beside_memcpy,
    "lookup": offload_stores.lookups,
    "lmcache": offload_lmcache.beside_lmcache,
    "metadata": offload_metadata.many_objects,
}


@click.command()
@click.option("--path", type=click.Path(file_okay=False, path_type=Path), help="Where the stores lie while it runs.")
@click.option("--objects", type=int, help="Entries of the metadata part.")
@click.option("--lmcache-python", type=click.Path(path_type=Path), envvar="KVTIDE_LMCACHE_PYTHON")
@click.option("--only", "only", multiple=True, type=click.Choice(list(PARTS)), help="Run these parts.")
@common_options
def main(
    path: Path | None,
    objects: int | None,
    lmcache_python: Path | None,
    only: tuple[str, ...],
    quick: bool,
    smoke: bool,
    json_file: Path | None,
) -> None:
    """Measure kvtide's stores beside plain system calls and LMCache's adapters."""
    with tempfile.TemporaryDirectory(dir=path, prefix="kvtide-bench-") as place:
        run = offload_stores.Run.of(Path(place), quick=quick, smoke=smoke, objects=objects, lmcache=lmcache_python)
        figures = [figure for name, part in PARTS.items() if not only or name in only for figure in part(run)]
    publish("kvtide's stores", figures, json_file, run.versions)


if __name__ == "__main__":
    main()
