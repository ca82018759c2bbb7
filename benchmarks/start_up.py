"""What starting costs: importing kvtide's packages, and the command, beside importing numpy alone.

    python benchmarks/start_up.py [--quick] [--json FILE]

Each import runs in a Python of its own, with everything in the page cache; times are CPU seconds of that process less
those of one that imports nothing, the fastest of several turns, since a busy neighbour only ever adds. The peer is
`import numpy`, which all of them include.

    hma, offload, config    `import kvtide.hma`, `kvtide.offload.manager`, `kvtide.connectors.config`
    help                    `kvtide --help`
    torch                   whether `kvtide.hma` brings torch along: 1 if it does
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
from report import Figure, Target, common_options, publish

NOTHING, NUMPY = "pass", "import numpy"
MEASURED = {
    "hma": "import kvtide.hma",
    "offload": "import kvtide.offload.manager",
    "config": "import kvtide.connectors.config",
    "help": "import sys; sys.argv = ['kvtide', '--help']; from kvtide.cli.main import run; run()",
}
HAS_TORCH = "import sys, kvtide.hma; sys.exit('torch' in sys.modules)"


def cpu_seconds(code: str) -> float:
    """CPU of a Python that runs this code."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{code!r} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


@click.command()
@common_options
def main(quick: bool, smoke: bool, json_file: Path | None) -> None:
    """Measure what imports and the command cost."""
    turns = 1 if smoke else 7 if quick else 21
    samples: dict[str, list[float]] = {code: [] for code in (NOTHING, NUMPY, *MEASURED.values())}
    for code in samples:
        cpu_seconds(code)  # fills the page cache
    for _ in range(turns):
        for code, seconds in samples.items():
            seconds.append(cpu_seconds(code))
    base = min(samples[NOTHING])
    milliseconds = {code: 1e3 * (min(seconds) - base) for code, seconds in samples.items()}
    figures = [
        Figure(
            name,
            milliseconds[code],
            "ms",
            milliseconds[NUMPY],
            Target("value", "<", 150) if name == "hma" else None,
            code if len(code) < 50 else "kvtide --help",
        )
        for name, code in MEASURED.items()
    ]
    torch = subprocess.run([sys.executable, "-c", HAS_TORCH], check=False).returncode
    figures.append(Figure("torch", float(torch), "", target=Target("value", "<", 1), note="in sys.modules"))
    publish("starting (peer: import numpy)", figures, json_file)


if __name__ == "__main__":
    main()
