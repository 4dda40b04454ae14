"""Time and weigh a meta-gradient by metagrad and by others: `python -m experiments.benchmarks.maml [WORKLOAD ...]`.

Every method computes the meta-gradient of the same batch from the same weights. First all are compared in float64;
then each runs in fresh processes, which take turns in a new order each round. Printed are medians, and ratios to the
textbook loop within a round, which are what to quote; absolute times belong to the machine. `memory` weighs loops of
1 to 200 steps instead. Needed is torch alone; higher, learn2learn, TorchOpt and JAX are run where they are installed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from experiments.benchmarks.maml import report, runner, slopes
from experiments.benchmarks.maml.methods import METHODS
from experiments.benchmarks.maml.workloads import WORKLOADS, load
from experiments.run import provenance
from experiments.run.progress import Progress

QUICK = ("sinusoid", "mlp-20")


def main() -> None:
    """Run what the command line names, by default everything."""
    arguments = parsed()
    results: dict[str, runner.Records] = {}
    growths: dict[str, slopes.Growth] = {}
    with runner.processes(arguments.threads, arguments.limit) as ask:
        for name in arguments.workloads:
            if name == slopes.WORKLOAD:
                methods = [method for method in slopes.METHODS if method in arguments.methods]
                total = sum(len(slopes.steps_of(method)) for method in methods)
                with Progress(total=total, unit="run", leave=False) as bar:
                    growths = slopes.grow_all(runner.counted(ask, bar), methods)
                print(slopes.table(load(name).about, growths), end="\n\n", flush=True)
            else:
                results[name] = run(ask, name, arguments)
            write(arguments.out, results, growths)
    print(report.LEGEND)


def run(ask: runner.Ask, name: str, arguments: argparse.Namespace) -> runner.Records:
    """Compare, measure and print one workload."""
    work = load(name)
    methods = [method for method in arguments.methods if not work.methods or method in work.methods]
    total = len({runner.BASELINE, *methods}) * (1 + arguments.rounds)
    with Progress(total=total, unit="run", leave=False) as bar:
        counted = runner.counted(ask, bar)
        records = runner.agreement(counted, name, methods)
        runner.measure(counted, name, records, rounds=arguments.rounds, seconds=arguments.seconds)
    print(report.table(name, work.about, records), end="\n\n", flush=True)
    return records


def write(folder: Path, results: dict[str, runner.Records], growths: dict[str, slopes.Growth]) -> None:
    """Write what has been measured so far."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = {
        "provenance": provenance.start(seed=0),
        "workloads": {name: runner.as_json(records) for name, records in results.items()},
        "memory": {method: asdict(growth) for method, growth in growths.items()},
    }
    (folder / "bench.json").write_text(json.dumps(everything, indent=2) + "\n")
    if results:
        report.chart(folder / "bench.png", results)


def parsed() -> argparse.Namespace:
    """Read the command line."""
    names = list(WORKLOADS)
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks.maml",
        description="Time and weigh a meta-gradient by metagrad and by others.",
    )
    add = parser.add_argument
    add("workloads", nargs="*", metavar="WORKLOAD", help=f"any of {', '.join(names)} (all)")
    add(
        "--methods",
        nargs="+",
        metavar="METHOD",
        default=list(METHODS),
        help="what to run beside the loop (all)",
    )
    add("--rounds", type=int, default=5, help="processes for each method (5)")
    add("--seconds", type=float, default=2.0, help="how long a process times (2)")
    add("--limit", type=float, default=600.0, help="seconds after which a process is stopped (600)")
    add(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="of each process (as many as torch takes)",
    )
    add("--quick", action="store_true", help=f"two rounds of half a second, of {', '.join(QUICK)}")
    add(
        "--out",
        type=Path,
        default=Path("outputs/bench"),
        help="where bench.json and bench.png go (outputs/bench)",
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds = 2, 0.5
    arguments.workloads = arguments.workloads or list(QUICK if arguments.quick else names)
    for chosen, known in ((arguments.workloads, names), (arguments.methods, METHODS)):
        unknown = [name for name in chosen if name not in known]
        if unknown:
            parser.error(f"{', '.join(unknown)}: expected any of {', '.join(known)}")
    if min(arguments.rounds, arguments.seconds, arguments.limit, arguments.threads) <= 0:
        parser.error("--rounds, --seconds, --limit and --threads must be positive")
    return arguments


if __name__ == "__main__":
    main()
