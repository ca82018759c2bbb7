"""One target under limits, in a process of its own: `child.py TARGET --seed N --examples N`.

A crash of the process, an example that takes more than 30 seconds of the processor, and memory beyond a GiB above what
the imports take are findings like an exception. Exit code 1 with the smallest example; the example being tried is in
the file `example` of the working folder, should the process die of it.
"""

from __future__ import annotations

import argparse
import faulthandler
import inspect
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import HypothesisWarning
from targets import make_targets, refused

from kvtide.kvcache import KvtideError

MEMORY_BYTES = 1 << 30
EXAMPLE_S = 30
RECURSION = 1000


class Hang(Exception):
    """An example took too long."""


def limit_memory() -> None:
    """Let the process have a GiB more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def on_alarm(*_: object) -> None:
    """The example under way has had its time."""
    raise Hang(f"more than {EXAMPLE_S} s of the processor")


def main() -> None:
    """Try examples until one fails, or all are tried."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=list(make_targets()))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int)
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", HypothesisWarning)
    faulthandler.enable()
    target = make_targets()[arguments.target]()
    signal.signal(signal.SIGPROF, on_alarm)
    tried = 0

    @seed(arguments.seed)
    @settings(
        max_examples=arguments.examples or target.quick,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(example=target.examples)
    def attempt(example: Any) -> None:
        nonlocal tried
        tried += 1
        Path("example").write_bytes(repr(example).encode("utf-8", "surrogatepass")[:1_000_000])
        folder = Path(tempfile.mkdtemp(dir="."))
        # hypothesis has raised the limit for itself; what is tested gets what it has in a process of its own.
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(len(inspect.stack(0)) + RECURSION)
        signal.setitimer(signal.ITIMER_PROF, EXAMPLE_S)
        try:
            target.call(example, folder.absolute())
        except KvtideError as error:
            refused(error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.setrecursionlimit(limit)
            shutil.rmtree(folder, ignore_errors=True)

    limit_memory()
    attempt()
    print(f"{arguments.target}: {tried} examples, seed {arguments.seed}")


if __name__ == "__main__":
    main()
