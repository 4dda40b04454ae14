"""Gradients, averaged over the processes of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from metagrad.core.budget import Bytes, checked_bytes
from metagrad.distributed.agreement import checked_weight, joined, named_tensors
from metagrad.distributed.exchange import Exchange
from metagrad.distributed.traffic import Traffic

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CALL = "average_gradients(params)"


def average_gradients(
    params: nn.Module | Mapping[str, Tensor] | Iterable[Tensor],
    *,
    weight: float = 1.0,
    bucket: Bytes = "25MiB",
    group: ProcessGroup | None = None,
) -> Traffic:
    r"""Replace the gradient of each parameter by its mean over the processes of a group.

    .. math:: g \leftarrow \frac{\sum_r w_r g_r}{\sum_r w_r}

    With the number of tasks (of examples) of each process as its weight this is the gradient of the mean over all of
    them, exactly, however unequal the shares are. Strided gradients are put into flat buckets by dtype and device, an
    all-reduce each, which run at the same time. Of row-sparse gradients (:class:`~metagrad.sparse.RowSparse`, sparse
    COO) rows and values are gathered, and the result is row-sparse again: what is sent depends on the rows that are
    touched, not on the table. Afterwards the gradients have the same bits in every process.

    All processes call it with the same parameters in the same order. A parameter without a gradient in some of them
    has zeros there; without one in any it keeps none. Parameters are not compared: let all processes begin with the
    same ones, by the same seed. Without a process group, or in one of a single process, nothing changes.

    Args:
        params: A module, whose parameters are meant (learned hyper-parameters of an algorithm among them), a mapping,
            or an iterable of tensors.
        weight: Of this process: the number of tasks in its share; 0 leaves its gradients out.
        bucket: How many bytes are reduced at once.
        group: The processes; None is the default group.

    Returns:
        The bytes that it took.

    Raises:
        ValueError: A gradient has a graph, another layout, or different ones in different processes; ``weight`` is
            negative or not finite, or 0 in every process.
        TypeError: A parameter is no tensor.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> maml = metagrad.MAML(model, torch.nn.functional.mse_loss, inner=metagrad.optim.rules.sgd(lr=0.1), steps=1)
        >>> examples = torch.ones(4, 5, 2), torch.ones(4, 5, 1)  # of 4 tasks
        >>> batch = metagrad.tasks.Batch(*[metagrad.tasks.Examples(*examples)] * 2).shard()
        >>> maml(batch).loss.backward()
        >>> metagrad.distributed.average_gradients(maml, weight=batch.num_tasks).processes
        1

    References:
        Li et al., "PyTorch distributed: experiences on accelerating data parallel training", VLDB 2020, section 3.2
        (buckets).
    """
    named = named_tensors(_CALL, params)
    weight, limit = checked_weight(_CALL, weight), checked_bytes(_CALL, "bucket", bucket)
    group = joined(group)
    if group is None or not named:
        return Traffic(1 if group is None else group.size())
    return Exchange(_CALL, named, weight, limit, group).complete()[0]
