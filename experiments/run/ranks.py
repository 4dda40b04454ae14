"""Several processes of one run, as `torchrun` starts them: each has a share of the tasks, and the first one writes.

A run calls its `Ranks` for everything that involves several processes. If there is only one process, the methods
change and communicate nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from experiments.run import checkpoint, resume
from metagrad.distributed import average_buffers, average_gradients
from metagrad.tasks.batch import share_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from experiments.run.build import Parts
    from experiments.run.schema import Config
    from metagrad.meta import MetaOutput
    from metagrad.tasks import Batch

T = TypeVar("T")
SILENT = ("hydra.output_subdir=null", "hydra/job_logging=disabled")
"""Overrides of the processes that write nothing."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run. The default is only this process.

    Attributes:
        group: The process group that communicates.
    """

    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """The number of processes."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """The index of this process."""
        return 0 if self.group is None else self.group.rank()

    @property
    def is_first(self) -> bool:
        """Whether this process writes, logs and draws."""
        return self.rank == 0

    def check(self, config: Config, parts: Parts) -> None:
        """Raise an error if several processes cannot compute the run together.

        Raises:
            ValueError: There are too few tasks, or the optimizer needs more than the averaged gradient.
        """
        if self.size == 1:
            return
        if config.meta_batch < self.size:
            raise ValueError(
                f"train: meta_batch={config.meta_batch} leaves some of {self.size} processes without a task. Set "
                f"meta_batch={self.size} or more, or start fewer processes."
            )
        if parts.takes_closure or hasattr(parts.optimizer, "backward"):
            raise ValueError(
                f"train: {type(parts.optimizer).__name__} takes derivatives of the loss of the whole meta-batch, of "
                "which each process has a share. Take optimizer=adam, shampoo, soap or another that uses averaged "
                "gradients, or start one process."
            )

    def seed(self, seed: int) -> None:
        """Seed each process differently, except for tasks and initialization."""
        if self.rank:
            state = np.random.SeedSequence(seed, spawn_key=(self.rank,)).generate_state(1, np.uint64)
            torch.manual_seed(int(state[0] >> np.uint64(1)))

    def share(self, batch: Batch) -> Batch:
        """Return the tasks of this process. The result is empty if there are fewer tasks than processes."""
        return batch if self.size == 1 else batch.select(share_of(batch.num_tasks, self.rank, self.size))

    @contextlib.contextmanager
    def averaging(self, module: torch.nn.Module, weight: float) -> Iterator[None]:
        """Average the gradients of a backward pass and the changed buffers over all tasks.

        `weight` is the number of tasks that count in this process.
        """
        yield
        if self.size > 1:
            with _told():
                average_gradients(module, weight=weight, group=self.group)
                average_buffers(module, weight=weight, group=self.group)

    def mean(self, values: Mapping[str, float], weight: float) -> dict[str, float]:
        """Return means over all tasks, given the means over the `weight` tasks of each process."""
        if self.size == 1:
            return dict(values)
        everyone = [(part, number) for part, number in self.gathered((dict(values), weight)) if number]
        total = sum(number for _, number in everyone)
        return {name: math.fsum(part[name] * n for part, n in everyone) / total for name in everyone[0][0]}

    def total(self, number: int) -> int:
        """Return the sum of a number over processes."""
        return self._reduced(number, dist.ReduceOp.SUM)

    def largest(self, number: int) -> int:
        """Return the maximum of a number over processes."""
        return self._reduced(number, dist.ReduceOp.MAX)

    def _reduced(self, number: int, how: dist.ReduceOp.RedOpType) -> int:
        if self.size == 1:
            return number
        value = torch.tensor(number)
        with _told():
            dist.all_reduce(value, how, group=self.group)
        return int(value)

    def gathered(self, value: T) -> list[T]:
        """Return a picklable value of every process."""
        if self.size == 1:
            return [value]
        everyone: list[Any] = [None] * self.size
        with _told():
            dist.all_gather_object(everyone, value, group=self.group)
        return everyone


def counted(out: MetaOutput) -> int:
    """Return the number of tasks over which the loss of a meta-batch is averaged."""
    return int((~out.skipped).sum())


def is_launched() -> bool:
    """Return whether `torchrun`, or another launcher with its variables, started this process as one of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


@contextlib.contextmanager
def joined(uses_cuda: bool) -> Iterator[Ranks]:
    """Join the processes of this run, if there are several. Each process has its own CUDA device.

    Raises:
        ValueError: There are fewer CUDA devices than processes.
    """
    if not is_launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield Ranks()
        return
    if uses_cuda:
        local = int(os.environ.get("LOCAL_RANK", 0))
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"train: process {local} of this machine has no CUDA device, of {torch.cuda.device_count()}. Start "
                "as many processes as there are devices, or set device=cpu."
            )
        torch.cuda.set_device(local)
    with _told():
        store, rank, size = next(rendezvous("env://"))
        # torchrun keeps the store when it restarts processes, so the store has addresses of processes that have ended
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = "cpu:gloo,cuda:nccl" if uses_cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    yield Ranks(dist.group.WORLD)
    dist.destroy_process_group()  # not after an error: it may wait for a process that has ended


def command_line(arguments: Sequence[str]) -> list[str]:
    """Return the command line of this process, completed from the run folder it resumes, if any.

    All processes have the same folder, by default `outputs/ID` with the id of the run. Processes that
    `torchrun --max-restarts` restarts resume from the last checkpoint there.

    Raises:
        ValueError: As `resume.command_line`, or the command line does not determine the folder.
    """
    arguments = list(arguments)
    if not is_launched():
        return resume.command_line(arguments)
    if {"-m", "--multirun"} & set(arguments):
        raise ValueError(
            "train: several processes compute one run; leave out -m, or start them for each job."
        )
    folder = _folder(arguments)
    if not any(_is_place(a) for a in arguments):
        arguments.append(f"hydra.run.dir={resume.quoted(folder)}")
    is_restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if is_restarted and (folder / checkpoint.FILE).is_file():
        arguments = [a for a in arguments if _is_place(a) or _key(a) != "resume"]
        arguments += [] if any(_key(a) == "resume" for a in arguments) else [f"resume={resume.AUTO}"]
    completed = resume.command_line(arguments)
    return completed if int(os.environ["RANK"]) == 0 else [*completed, *SILENT]


def _folder(arguments: Sequence[str]) -> Path:
    """Return the folder that all processes write to."""
    given = [a.partition("=")[2].strip("'\"") for a in arguments if _is_place(a)]
    if given and "${" not in given[-1]:
        return Path(given[-1])
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if given or name == "none":
        raise ValueError(
            "train: processes of one run must write to one folder. Start them by torchrun --standalone or "
            "--rdzv-id=NAME, or give a plain hydra.run.dir=FOLDER."
        )
    return Path("outputs") / name


def _key(argument: str) -> str:
    return argument.lstrip("+").partition("=")[0]


def _is_place(argument: str) -> bool:
    """Return whether an argument names the folder of the run. A checkpoint file does not count."""
    value = Path(argument.partition("=")[2].strip("'\""))
    return _key(argument) == "hydra.run.dir" or (_key(argument) == "resume" and value.is_dir())


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Raise an error of one sentence if another process has ended."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ConnectionError(
            "Another process of this run has ended, or cannot be reached; what it says is above or below. "
            f"({str(error).splitlines()[0]})"
        ) from error
