"""What a step at many processes sends, and how long that takes: `python -m experiments.studies.scale [--measure]`.

Computed from a bandwidth and a latency that are given, for three learners; the bytes of two processes are measured
beside what `metagrad.distributed` says that it sends, where the system counts them (Linux).
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from experiments.run.job import launch
from experiments.run.progress import Progress
from metagrad.distributed import Traffic, average_gradients
from metagrad.meta import MAML
from metagrad.models import Conv4
from metagrad.optim import rules
from metagrad.sparse import RowSparse
from metagrad.tasks import Batch, Examples

COUNTERS = Path("/proc/net/dev")
MEASURED = {
    "112 thousand parameters": (112_261, 0),
    "5 million": (5_000_000, 0),
    "a million rows of 32": (0, 6_400),
}
"""Parameters that are dense, and rows of a table that each process touches."""
REPEATS = 5
STEPS = 15
TASKS = 8


class Network(NamedTuple):
    """What connects the processes.

    Attributes:
        processes: N.
        bandwidth: Bytes per second that each process sends, and receives at the same time.
        latency: Seconds that a message takes.
    """

    processes: int
    bandwidth: float
    latency: float

    def all_reduce(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce: by a ring, or by two trees, whichever is faster."""
        ring = 2 * (self.processes - 1) * (self.latency + nbytes / self.processes / self.bandwidth)
        trees = 2 * (math.ceil(math.log2(self.processes)) * self.latency + nbytes / self.bandwidth)
        return min(ring, trees)

    def all_gather(self, nbytes: float) -> float:
        """Return the seconds of a ring all-gather of so many bytes of each process."""
        return (self.processes - 1) * (self.latency + nbytes / self.bandwidth)

    def all_to_all(self, nbytes: float) -> float:
        """Return the seconds of an all-to-all in which each process sends so many bytes, all messages under way."""
        return self.latency * math.ceil(math.log2(self.processes)) + nbytes / self.bandwidth


class Step(NamedTuple):
    """What the outer step of one learner sends from each process, and how long it takes."""

    learner: str
    how: str
    nbytes: float
    seconds: float


def dense(learner: str, parameters: int, net: Network) -> Step:
    """Return the step of a learner whose gradients are dense, in float32."""
    traffic = Traffic(net.processes, reduced=4 * parameters)
    return Step(learner, "all-reduce of gradients", traffic.sent, net.all_reduce(traffic.reduced))


def table(rows: int, width: int, touched: int, net: Network) -> list[Step]:
    """Return the steps of a learner with a table, of which each process touches some rows, in float32.

    Rows that are kept by one process each are asked for, received, and their gradients sent: three all-to-alls.
    """
    learner, number = f"table of {rows:.0e} rows of {width}".replace("e+0", "e"), net.processes
    ids = 4 if rows < 2**31 else 8
    own = touched * (ids + 4 * width)
    gathered = Traffic(number, gathered=own + 16).sent
    asked, values = touched * ids, touched * 4 * width
    exchanged = (asked + values + own) * (number - 1) / number
    seconds = sum(net.all_to_all(part * (number - 1) / number) for part in (asked, values, own))
    return [
        dense(f"{learner}, dense", rows * width, net),
        Step(learner, "all-gather of touched rows", gathered, net.all_gather(own)),
        Step(f"{learner}, in shards", "all-to-all of touched rows", exchanged, seconds),
    ]


def steps(net: Network, touched: int) -> list[Step]:
    """Return the steps of all learners."""
    return [
        dense("Conv4, 64 filters", 112_261, net),
        dense("transformer of 100M", 100_000_000, net),
        *table(10**6, 32, touched, net),
        *table(10**9, 64, touched, net),
    ]


def shown(found: list[Step]) -> str:
    """Return steps as a table."""
    lines = ["| learner | what is sent | bytes of a process | time |", "| --- | --- | --- | --- |"]
    lines += [f"| {s.learner} | {s.how} | {_bytes(s.nbytes)} | {_time(s.seconds)} |" for s in found]
    return "\n".join(lines)


class Measured(NamedTuple):
    """Bytes that all processes sent in an average: predicted, and counted by the system."""

    what: str
    predicted: int
    counted: float


class Speed(NamedTuple):
    """Outer steps of a meta-batch: of one process while the others wait, and of all, each with its share.

    Attributes:
        one: Tasks per second of one process, on the clock.
        all: Of all processes.
        processor: The processor time of one process over that of the slowest share. It counts no waiting, so that
            others on the machine matter little.
    """

    one: float
    all: float
    processor: float


def measure(processes: int, *, steps: int = STEPS) -> tuple[list[Measured], Speed]:
    """Average gradients in some processes of this machine, and count what they send; and time outer steps.

    Args:
        processes: How many.
        steps: How often each is timed.

    Raises:
        ValueError: The system does not count bytes.
    """
    if not COUNTERS.exists():
        raise ValueError(f"scale: --measure needs {COUNTERS}, which counts bytes; Linux has it.")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure_in, (processes, folder, steps), nprocs=processes)  # type: ignore[reportPrivateImportUsage]
        rows, speed = torch.load(f"{folder}/measured.pt")
    return [Measured(*row) for row in rows], Speed(*speed)


def _measure_in(rank: int, processes: int, folder: str, steps: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", processes)  # type: ignore[reportPrivateImportUsage]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=processes, timeout=timedelta(minutes=2)
    )
    cases = Progress(MEASURED.items(), unit="case", hidden=rank != 0, leave=False)
    rows = [(what, *_sent(parameters, touched)) for what, (parameters, touched) in cases]
    speed = _speed(steps)
    if rank == 0:
        torch.save((rows, tuple(speed)), f"{folder}/measured.pt")
    dist.destroy_process_group()


def _sent(parameters: int, touched: int) -> tuple[int, float]:
    """Return what all processes send, predicted, and counted, the least of some repeats: others may send too."""
    param = torch.zeros(parameters or 1, requires_grad=True)
    rows = torch.empty(10**6, 32, requires_grad=True)
    counts = []
    for _ in range(REPEATS):
        if parameters:
            param.grad = torch.ones_like(param)
        if touched:
            ids = torch.randperm(len(rows))[:touched].sort().values
            rows.grad = RowSparse(ids, torch.ones(touched, 32), rows.shape)
        dist.barrier()
        before = _counter()
        dist.barrier()
        traffic = average_gradients([param, rows])
        dist.barrier()
        counts.append(_counter() - before)
        dist.barrier()
    return traffic.sent * dist.get_world_size(), min(counts)


def _speed(steps: int) -> Speed:
    """Time outer steps of one process and of all by turns, and return medians."""
    torch.manual_seed(0)
    x, y = torch.randn(TASKS, 25, 1, 28, 28), torch.arange(5).repeat(TASKS, 5)
    batch = Batch(Examples(x[:, :5], y[:, :5]), Examples(x, y))
    maml = MAML(Conv4(5), F.cross_entropy, inner=rules.sgd(lr=0.4), steps=1)
    outer = torch.optim.Adam(maml.parameters())

    def step(part: Batch, *, averages: bool) -> None:
        outer.zero_grad()
        maml(part).loss.backward()
        if averages:
            average_gradients(maml, weight=part.num_tasks)
        outer.step()

    def alone() -> None:
        if dist.get_rank() == 0:
            step(batch, averages=False)

    def together() -> None:
        step(batch.shard(), averages=True)

    rounds = Progress(range(steps + 1), unit="step", hidden=dist.get_rank() != 0, leave=False)
    taken = [(*_seconds(alone), *_seconds(together)) for _ in rounds]
    # The first step finds out how tasks run.
    one, one_processor, every, every_processor = zip(*taken[1:], strict=True)
    ratios = [a / b for a, b in zip(one_processor, every_processor, strict=True)]
    return Speed(TASKS / statistics.median(one), TASKS / statistics.median(every), statistics.median(ratios))


def _seconds(step: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds until all processes have taken a step, and the most processor time that one took."""
    dist.barrier()
    start, own = time.perf_counter(), time.process_time()
    step()
    slowest = torch.tensor(time.process_time() - own, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return time.perf_counter() - start, float(slowest)


def _counter() -> int:
    """Return the bytes that were sent on the loopback interface."""
    fields = next(line for line in COUNTERS.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(fields.partition(":")[2].split()[8])


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def _time(seconds: float) -> str:
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(prog="experiments.studies.scale", description=__doc__)
    parser.add_argument("--processes", type=int, default=1000)
    parser.add_argument("--bandwidth", type=float, default=50e9, help="bytes per second of each process")
    parser.add_argument("--latency", type=float, default=10e-6, help="seconds of a message")
    parser.add_argument("--touched", type=int, default=6400, help="rows of a table that a process touches")
    parser.add_argument("--measure", type=int, metavar="N", help="count the bytes of N processes here")
    options = parser.parse_args()
    if min(options.processes, options.measure or 2) < 2 or options.bandwidth <= 0 or options.latency < 0:
        raise ValueError(
            "scale: give two processes or more, a bandwidth above 0, and a latency of 0 or more."
        )
    net = Network(options.processes, options.bandwidth, options.latency)
    print(f"{net.processes} processes, {_bytes(net.bandwidth)}/s each, latency {_time(net.latency)}:\n")
    print(shown(steps(net, options.touched)))
    if options.measure:
        print(f"\nBytes that {options.measure} processes of this machine send together:\n")
        rows, speed = measure(options.measure)
        for row in rows:
            pair = f"predicted {_bytes(row.predicted)}, counted {_bytes(row.counted)}"
            print(f"{row.what}: {pair}, {row.counted / row.predicted:.3f}")
        pair = f"1 process {speed.one:.3g} tasks/s, {options.measure} processes {speed.all:.3g} tasks/s"
        print(
            f"\nOuter steps of {TASKS} tasks on Conv4, a thread each: {pair}, {speed.all / speed.one:.2f} times"
        )
        print(
            f"as fast on the clock ({os.cpu_count()} cores), {speed.processor:.2f} times by processor time."
        )


if __name__ == "__main__":
    launch(main)
