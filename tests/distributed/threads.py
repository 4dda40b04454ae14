"""Process groups whose processes are threads: the collectives of gloo, without the imports of a process."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch.distributed as dist


def in_threads(size, function):
    """Return what ``function(group)`` returns in each of ``size`` threads; what one of them raises is raised."""
    store, results, errors = dist.HashStore(), [None] * size, []

    def work(rank):
        try:
            group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
            results[rank] = function(group)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
