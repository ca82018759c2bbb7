"""Who simulates the points of a sweep: processes of this machine, or the workers of a Dask cluster.

Both call one function on every point and report results as they come, in any order. A point whose worker dies is
reported as failed, and the others go on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module

from kvtide.kvcache import ConfigError, MissingExtra

from .sweep import Point, Result

Work = Callable[[Point], Result]
Report = Callable[[Point, Result], None]

DIED = "the process that simulated it died; it may have needed more memory than there is"
# Seconds that a scheduler has to answer.
PATIENCE = 10


def run_in_processes(points: Sequence[Point], work: Work, report: Report, jobs: int) -> None:
    """Run `work`, which must be importable by name, on every point in at most `jobs` processes."""
    waiting = deque(points)
    suspects: list[Point] = []
    while waiting:
        suspects += _run_until_broken(waiting, work, report, jobs)
    # One of these killed its process, and with it the pool of all; alone it does so again, and the others do not.
    for point in suspects:
        if _run_until_broken(deque([point]), work, report, 1):
            report(point, Result(error=DIED))


def _run_until_broken(waiting: deque[Point], work: Work, report: Report, jobs: int) -> list[Point]:
    """Take points until none is left or a process died; the points that were running then."""
    running: dict[Future[Result], Point] = {}
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_begin_worker)
    try:
        while waiting or running:
            # No more than the processes can take: what is queued when the pool breaks is lost with it.
            while waiting and len(running) < jobs:
                running[pool.submit(work, waiting[0])] = waiting[0]
                waiting.popleft()
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                result = future.result()
                report(running.pop(future), result)
    except BrokenProcessPool:
        return list(running.values())
    except BaseException:
        # Interrupted: what runs is not waited for.
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return []


def _begin_worker() -> None:
    """A worker ends with its parent, even one that was killed; an interrupt is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def run_on_dask(points: Sequence[Point], work: Work, report: Report, address: str) -> None:
    """Run `work` on a Dask cluster, whose workers need kvtide and the files that the flags name.

    `ConfigError` when no scheduler answers at the address, `MissingExtra` without Dask.
    """
    try:
        distributed = import_module("distributed")
    except ModuleNotFoundError:
        raise MissingExtra("a sweep on a Dask cluster", "distributed", "dask") from None
    try:
        client = distributed.Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"no Dask scheduler answers at {address!r} within {PATIENCE} s: {reason}") from None
    with client:
        futures = {client.submit(work, point, pure=False): point for point in points}
        for future in distributed.as_completed(list(futures), loop=client.loop):
            failure = future.exception()
            if failure is None:
                result = future.result()
            elif isinstance(failure, distributed.KilledWorker):
                result = Result(error=DIED)
            else:
                result = Result(error=f"the Dask worker failed: {type(failure).__name__}: {failure}"[:300])
            report(futures.pop(future), result)
