"""Processes of gloo that meet in a file. All of them call the same functions, and save the results."""

import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.conftest import SEED, shift_seeds


def in_processes(size, cases, folder):
    """Return the results of ``case(group)`` in each process, as a dict by name for each rank.

    The result of a case that raises is its traceback.
    """
    torch.multiprocessing.spawn(_work, (size, cases, folder), nprocs=size)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _work(rank, size, cases, folder):
    torch.set_num_threads(1)
    if SEED:
        shift_seeds()
    torch.set_default_dtype(torch.float64)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    torch.save({name: _result(case) for name, case in cases.items()}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def _result(case):
    torch.manual_seed(0)
    try:
        return case(dist.group.WORLD)
    except Exception:
        return traceback.format_exc()
