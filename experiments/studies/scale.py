"""What processes send in an outer step, and how fast they are: `python -m experiments.studies.scale [--processes N]`.

The study counts the bytes that processes of this machine send (on Linux), and compares them with the prediction of
`metagrad.distributed`. It times the outer steps of all processes and of one process.
"""

from __future__ import annotations

import argparse
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
from metagrad.distributed import average_gradients
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
"""Number of dense parameters, and number of table rows that each process uses."""
REPEATS = 5
STEPS = 15
TASKS = 8


class Measured(NamedTuple):
    """Bytes that all processes sent in an average: predicted, and counted by the system."""

    what: str
    predicted: int
    counted: float


class Speed(NamedTuple):
    """Times of the outer steps of a meta-batch, with one process and with all processes.

    Attributes:
        one: Tasks per second of one process, in wall time.
        all: Seconds with all processes.
        processor: CPU seconds of one process, relative to the slowest share. Waiting is not counted, so other
            programs on the machine hardly matter.
    """

    one: float
    all: float
    processor: float


def measure(processes: int, *, steps: int = STEPS) -> tuple[list[Measured], Speed]:
    """Average gradients in several processes of this machine, count the bytes that they send, and time outer steps.

    Args:
        processes: Number of processes.
        steps: Number of timed repeats.

    Raises:
        ValueError: The system does not count bytes.
    """
    if not COUNTERS.exists():
        raise ValueError(f"scale: it needs {COUNTERS}, which counts bytes; Linux has it.")
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
    """Return the predicted bytes of all processes, and the minimum of repeated counts."""
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
    """Time outer steps of one process and of all processes alternately, and return medians."""
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
    # The first step tests how tasks run.
    one, one_processor, every, every_processor = zip(*taken[1:], strict=True)
    ratios = [a / b for a, b in zip(one_processor, every_processor, strict=True)]
    return Speed(TASKS / statistics.median(one), TASKS / statistics.median(every), statistics.median(ratios))


def _seconds(step: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds until all processes have taken a step, and the maximum CPU time of a process."""
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


def main() -> None:
    """Print the results that the command line selects."""
    parser = argparse.ArgumentParser(prog="experiments.studies.scale", description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    processes = parser.parse_args().processes
    if processes < 2:
        raise ValueError("scale: give two processes or more.")
    print(f"Bytes that {processes} processes of this machine send together:\n")
    rows, speed = measure(processes)
    for row in rows:
        pair = f"predicted {_bytes(row.predicted)}, counted {_bytes(row.counted)}"
        print(f"{row.what}: {pair}, {row.counted / row.predicted:.3f}")
    pair = f"1 process {speed.one:.3g} tasks/s, {processes} processes {speed.all:.3g} tasks/s"
    print(
        f"\nOuter steps of {TASKS} tasks on Conv4, a thread each: {pair}, {speed.all / speed.one:.2f} times"
    )
    print(f"as fast on the clock ({os.cpu_count()} cores), {speed.processor:.2f} times by processor time.")


if __name__ == "__main__":
    launch(main)
