"""Process groups of threads, with the collectives of gloo but without the imports of a new process."""

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
    """Return the results of ``function(group)`` in ``size`` threads. An exception of a thread is raised."""
    store, results, errors = dist.HashStore(), [None] * size, []

    def work(rank):
        try:
            results[rank] = function(group_of(store, rank, size))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    with sdpa_kernel(KERNELS):  # global flags, which concurrent threads would restore wrongly
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results
