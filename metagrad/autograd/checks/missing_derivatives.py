"""The error for derivatives that do not exist."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node

from metagrad.autograd.checks.lint import findings, with_recomputed
from metagrad.autograd.checks.lint_rules import Kind
from metagrad.core.tape import graph_nodes


class MissingDerivative(ValueError):  # noqa: N818 - it reads as what it says
    """A derivative of the order that is needed does not exist in torch, or is known to be wrong."""


def refuse_missing(
    call: str,
    loss: Tensor,
    *,
    order: int,
    behind: Iterable[Node] = (),
    kinds: tuple[Kind, ...] = ("cut", "error", "wrong"),
) -> None:
    """Raise if derivatives of a loss up to an order are cut, missing or wrong, naming every node to blame.

    Args:
        call: How the error names the caller.
        loss: With its graph.
        order: 2 for products, 3 for products that are differentiated.
        behind: Nodes at which the walk over the graph ends.
        kinds: What to refuse.
    """
    found = findings(with_recomputed(graph_nodes([loss], set(behind))), order, kinds)
    if found:
        raise MissingDerivative("\n".join(f"{call}: {finding}" for finding in found))
