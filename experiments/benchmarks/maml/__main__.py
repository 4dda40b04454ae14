"""Time and memory of a meta-gradient by several libraries: `python -m experiments.benchmarks.maml [WORKLOAD ...]`.

Every method computes the meta-gradient of the same batch from the same weights. First all methods are compared in
float64. Then each method runs in fresh processes, which take turns in a new order each round. The printed values
are medians, and ratios to the naive loop within a round. Quote the ratios, since absolute times belong to the
machine. Only torch is needed. higher, learn2learn, TorchOpt and JAX run if they are installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.arguments import add_words
from experiments.benchmarks.maml import runner
from experiments.benchmarks.maml.methods import BASELINE, METHODS
from experiments.benchmarks.maml.runner import ROUNDING, Record, Records, ratios
from experiments.benchmarks.maml.workloads import WORKLOADS, load
from experiments.run import provenance
from experiments.run.files import write_text
from experiments.run.progress import Progress

QUICK = ("sinusoid", "mlp-20")
MIB = 2**20
HEADER = f"{'':30}{'median ms':>10}{'faster':>9}  {'in the rounds':15}{'peak MiB':>10}{'of loop':>9}{'compile s':>14}"


LEGEND = (
    "faster: the loop's time over the method's, the median over the rounds, and its range. compile s: of the first "
    "process, and of later ones, which find the compiler's cache. *: as XLA states it, else "
    "by torch's allocator."
)


def main() -> None:
    """Run the workloads of the command line. The default is all workloads."""
    arguments = parsed()
    results: dict[str, Any] = {}
    with runner.processes(arguments.device, arguments.threads, arguments.limit) as ask:
        for name in arguments.workloads:
            results[name] = runner.as_json(run(ask, name, arguments))
            everything = {"provenance": provenance.start(seed=0), "workloads": results}
            write_text(arguments.out / "bench.json", json.dumps(everything, indent=2) + "\n")
    print(LEGEND)


def run(ask: runner.Ask, name: str, arguments: argparse.Namespace) -> Records:
    """Compare, measure and print one workload."""
    work = load(name)
    methods = [method for method in arguments.methods if not work.methods or method in work.methods]
    total = len({runner.BASELINE, *methods}) * (1 + arguments.rounds)
    with Progress(total=total, unit="run", leave=False) as bar:
        counted = runner.counted(ask, bar)
        records = runner.agreement(counted, name, methods)
        runner.measure(counted, name, records, rounds=arguments.rounds, seconds=arguments.seconds)
    print(table(name, work.about, records), end="\n\n", flush=True)
    return records


def table(name: str, about: str, records: Records) -> str:
    """Format medians, ratios to the loop, peaks and compile times. Also list methods that failed."""
    return "\n".join([f"{name}: {about}", HEADER, *(_line(method, records) for method in records)])


def _line(method: str, records: Records) -> str:
    record, loop = records[method], records[BASELINE]
    if not record.rounds:
        return f"{method:30}{record.note}"
    found = ratios(record, loop)
    milliseconds = 1000 * statistics.median(answer["median"] for answer in record.rounds)
    spread = f"{found.lowest:.2f} to {found.highest:.2f}"
    return (
        f"{method:30}{milliseconds:10.1f}{found.faster:8.2f}x  {spread:15}{_peak(record, found.memory)}"
        f"{_compile(record):>14}{_wrong(record)}"
    )


def _peak(record: Record, of_loop: float | None) -> str:
    if record.peak is None or of_loop is None:
        return f"{'':19}"
    mark = "*" if record.rounds[0]["peak_by"] == "compiler" else " "
    return f"{record.peak / MIB:9.2f}{mark}{of_loop:8.2f}x"


def _compile(record: Record) -> str:
    """Return the time of compilation in the first process, and with the cache of the first process."""
    cold, *warm = record.compile_seconds
    if cold < 1:
        return ""
    return f"{cold:.1f}, {statistics.median(warm):.1f}" if warm else f"{cold:.1f}"


def _wrong(record: Record) -> str:
    error = record.error or 0.0
    return "" if error < ROUNDING else f"   wrong by {100 * error:.1g} %"


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks.maml",
        description="Time and weigh a meta-gradient by metagrad and by others.",
    )
    add = parser.add_argument
    add_words(parser, "workloads", WORKLOADS, [])
    add_words(parser, "--methods", METHODS)
    add("--rounds", type=int, default=5, help="processes for each method (5)")
    add("--seconds", type=float, default=2.0, help="how long a process times (2)")
    add("--limit", type=float, default=600.0, help="seconds after which a process is stopped (600)")
    add("--threads", type=int, default=torch.get_num_threads(), help="of each process (as torch takes)")
    add("--device", default="cpu", help="where the meta-gradients are computed (cpu)")
    add("--quick", action="store_true", help=f"two rounds of half a second, of {', '.join(QUICK)}")
    add("--out", type=Path, default=Path("outputs/bench"), help="where bench.json goes (outputs/bench)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds = 2, 0.5
    arguments.workloads = arguments.workloads or list(QUICK if arguments.quick else WORKLOADS)
    if min(arguments.rounds, arguments.seconds, arguments.limit, arguments.threads) <= 0:
        parser.error("--rounds, --seconds, --limit and --threads must be positive")
    return arguments


if __name__ == "__main__":
    main()
