"""The error for missing derivatives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node

from metagrad.autograd.checks.lint import custom_functions, findings, with_recomputed
from metagrad.autograd.checks.lint_rules import Kind
from metagrad.core.checks import warn
from metagrad.core.tape import graph_nodes


class MissingDerivative(ValueError):  # noqa: N818 - it reads as what it says
    """A required derivative does not exist in torch, or is known to be incorrect."""


def refuse_missing(
    call: str,
    loss: Tensor,
    *,
    order: int,
    behind: Iterable[Node] = (),
    kinds: tuple[Kind, ...] = ("cut", "error", "wrong"),
) -> None:
    """Raise ``MissingDerivative`` with every node whose derivatives are detached, missing or incorrect.

    A custom ``autograd.Function`` warns, because its backward cannot be inspected.

    Args:
        call: Name of the caller in the error message.
        loss: A tensor with a graph.
        order: 2 for Hessian-vector products, 3 if these products are differentiated.
        behind: The nodes that end the walk over the graph.
        kinds: The kinds of findings that raise.
    """
    functions: set[str] = set()

    def walk() -> Iterator[Node]:
        for node in with_recomputed(graph_nodes([loss], set(behind))):
            functions.update(custom_functions([node]))  # the nodes of a checkpointed call are freed
            yield node

    found = findings(walk(), order, kinds)
    if found:
        raise MissingDerivative("\n".join(f"{call}: {finding}" for finding in found))
    if functions:
        warn(
            f"{call}: the graph has the custom autograd.Function {', '.join(sorted(functions))}, which is "
            "differentiated twice. torch does not check that this is correct. Run metagrad.preflight, which compares "
            "it with finite differences."
        )
