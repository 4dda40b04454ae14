"""Process groups whose processes are threads: the collectives of gloo, without the imports of a process."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]


def group_of(store, rank, size):
    group, kind = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType.GLOO
    gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
    group._register_backend(torch.device("cpu"), kind, gloo)
    group._set_default_backend(kind)
    return group


def in_threads(size, function):
    """Return what ``function(group)`` returns in each of ``size`` threads; what one of them raises is raised."""
    store, results, errors = dist.HashStore(), [None] * size, []

    def work(rank):
        try:
            results[rank] = function(group_of(store, rank, size))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    with sdpa_kernel(KERNELS):  # of the whole process: threads that change them at a time leave them changed
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results
