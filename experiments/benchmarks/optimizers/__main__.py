"""What a step of an optimizer costs, in gradients: `python -m experiments.benchmarks.optimizers`.

An MLP, a Conv4 and a transformer, at two sizes of a batch. Before each step a gradient (zero_grad, forward, backward)
of a copy of the model is timed; printed are medians over the rounds of the ratio of both, over whole periods where a
step is not like the next: "-10" in a name says that curvature, roots or bases are renewed every 10 steps, or that
there are at most 10 products with the Hessian. The peak is that of metagrad's MemoryTracker, from making the
optimizer to the end of its first period and one step more, state included, over that of one gradient. With one
thread, times are those of the processor.
`pytorch_optimizer` takes part where it is installed, and is given gradients with their graph at the steps for which
it wants them.

First, estimates of diagonals are compared with dense matrices in float64, and equal rules with each other.

`python -m experiments.benchmarks.optimizers robustness` asks instead which optimizers learn small networks at their
defaults, from many seeds; `python -m experiments.benchmarks.optimizers zoo` trains eight problems by every optimizer;
`python -m experiments.benchmarks.optimizers lbfgs` compares L-BFGS with torch's.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch

from experiments.benchmarks.optimizers import lbfgs, robustness, zoo
from experiments.benchmarks.optimizers.checks import check
from experiments.benchmarks.optimizers.measuring import measure
from experiments.benchmarks.optimizers.methods import METHODS, WORKLOADS
from experiments.benchmarks.optimizers.report import table, write


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks.optimizers",
        description="What a step of an optimizer costs, in gradients.",
    )
    add = parser.add_argument
    add(
        "study",
        nargs="?",
        default="cost",
        choices=["cost", "lbfgs", "robustness", "zoo"],
        help="what is measured (cost)",
    )
    add("--workloads", nargs="+", default=list(WORKLOADS), help=f"any of {', '.join(WORKLOADS)} (all)")
    add(
        "--optimizers",
        nargs="+",
        help=f"any of {', '.join(METHODS)} (all); other studies have theirs",
    )
    add("--rounds", type=int, default=3, help="periods of each optimizer, or pairs of runs (3)")
    add("--threads", type=int, default=torch.get_num_threads(), help="of torch (as many as it takes)")
    add("--out", type=Path, default=Path("outputs/bench_optimizers"), help="where optimizers.* go")
    arguments = parser.parse_args()
    methods = {"robustness": robustness.OPTIMIZERS, "zoo": zoo.OPTIMIZERS}.get(arguments.study, METHODS)
    arguments.optimizers = arguments.optimizers or list(methods)
    for chosen, known in ((arguments.workloads, WORKLOADS), (arguments.optimizers, methods)):
        unknown = [name for name in chosen if name not in known]
        if unknown:
            parser.error(f"{', '.join(unknown)}: expected any of {', '.join(known)}")
    if min(arguments.rounds, arguments.threads) < 1:
        parser.error("--rounds and --threads must be positive")
    return arguments


def main() -> None:
    """Check, then measure what the command line names, by default everything."""
    arguments = parsed()
    warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
    warnings.filterwarnings("ignore", "KFAC")  # names the parameters of norms, which follow the gradient
    torch.set_num_threads(arguments.threads)
    if arguments.study == "lbfgs":
        lbfgs.main(arguments.rounds, arguments.out)
        return
    studies = {"robustness": robustness.main, "zoo": zoo.main}
    if arguments.study in studies:
        studies[arguments.study](arguments.optimizers, arguments.out)
        return
    checked, everything = check(arguments.optimizers), {}
    print("\n".join(checked), end="\n\n", flush=True)
    for name in arguments.workloads:
        everything[name] = measure(WORKLOADS[name](), arguments.optimizers, arguments.rounds)
        print(table(name, everything[name]), end="\n\n", flush=True)
        write(arguments.out, checked, everything)


if __name__ == "__main__":
    main()
