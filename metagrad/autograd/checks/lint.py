"""Find the nodes of a graph whose higher derivatives are missing or incorrect."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from metagrad.autograd.checks.lint_rules import RULES, Kind, LintRule
from metagrad.core.checks import is_a
from metagrad.core.tape import graph_nodes

HIGHEST_ORDER = 3

_EFFECTS: dict[Kind, str] = {
    "cut": "returns gradients without their graph, so that derivatives of order {order} silently lose terms",
    "dense": "computes the gradient of a sparse tensor densely, from order {order} on",
    "error": "raises an error in derivatives of order {order}",
    "wrong": "returns derivatives of order {order} that are silently wrong",
}


@dataclass(frozen=True)
class Finding:
    """A node with a defect. ``str(finding)`` is a sentence for the user.

    Attributes:
        node: The name of the node, ``node.name()``.
        source: The call that made the node.
        kind: ``"cut"``, ``"dense"``, ``"error"`` or ``"wrong"``.
        order: The lowest derivative of the loss that is affected.
        suggestion: The suggested fix.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> (finding,) = metagrad.autograd.lint(torch.nn.functional.hardsigmoid(x))
        >>> str(finding).split(". ")[0]
        'HardsigmoidBackward0, from F.hardsigmoid, raises an error in derivatives of order 2'
    """

    node: str
    source: str
    kind: Kind
    order: int
    suggestion: str

    def __str__(self) -> str:
        effect = _EFFECTS[self.kind].format(order=self.order)
        return f"{self.node}, from {self.source}, {effect}. {self.suggestion}"


def lint(loss: Tensor, *, order: int = 2) -> tuple[Finding, ...]:
    """Find the nodes of a graph whose derivatives, up to an order, are detached, dense, missing or incorrect.

    An order is the number of derivatives of ``loss``. Order 1 is its gradient. Order 2 is the gradient of the
    gradient, which MAML needs. The Hessian of a MAML objective needs order 3 of the inner loss. The loss may contain
    gradients. Call this function before a backward pass frees the graph.

    The known defects of torch are a table, ``lint_rules.RULES``. Other nodes count as correct. The backward of a
    custom ``autograd.Function`` cannot be inspected, except for the decorator ``once_differentiable``.
    :func:`metagrad.gradcheck` also finds functions that detach or that store an intermediate result on ``ctx``.
    Calls of :func:`metagrad.checkpoint`, and checkpointed steps of :func:`metagrad.unroll`, run again so that their
    graphs are read.

    Args:
        loss: A tensor of any shape with a graph.
        order: The highest derivative that will be computed: 1, 2 or 3.

    Returns:
        The findings, without duplicates, sorted by order. An empty tuple if nothing was found.

    Raises:
        TypeError: ``loss`` is not a tensor.
        ValueError: ``loss`` has no graph, or ``order`` is not 1, 2 or 3.

    Example:
        >>> x = torch.randn(3, 5, requires_grad=True)
        >>> loss = torch.nn.functional.layer_norm(x, (5,)).exp().sum()
        >>> metagrad.autograd.lint(loss)
        ()
        >>> [(f.node, f.kind, f.order) for f in metagrad.autograd.lint(loss, order=3)]
        [('NativeLayerNormBackward0', 'wrong', 3)]
    """
    if not is_a(loss, Tensor):
        raise TypeError(f"lint(loss): loss must be a tensor, got {type(loss).__name__}.")
    if not loss.requires_grad:
        raise ValueError(
            "lint(loss): the loss has no graph: nothing it was computed from requires grad, or it was computed "
            "under torch.no_grad() or detached."
        )
    if not 1 <= order <= HIGHEST_ORDER:
        raise ValueError(
            f"lint(loss, order): order must be from 1 to {HIGHEST_ORDER}, got {order}. Beyond, nothing is known; "
            "metagrad.gradcheck checks any order by finite differences."
        )
    return findings(with_recomputed(graph_nodes([loss])), order, ("cut", "dense", "error", "wrong"))


def findings(nodes: Iterable[Node], order: int, kinds: tuple[Kind, ...]) -> tuple[Finding, ...]:
    """Return the findings of some kinds at some nodes."""
    found: dict[Finding, None] = {}
    for node in nodes:
        for rule in _rules_of(node.name()):
            if rule.order <= order and rule.kind in kinds and (rule.applies is None or rule.applies(node)):
                found[Finding(node.name(), rule.source, rule.kind, rule.order, rule.suggestion)] = None
    return tuple(sorted(found, key=lambda finding: finding.order))


def with_recomputed(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield nodes, and the nodes of checkpointed calls, which run again for this purpose."""
    for node in nodes:
        yield node
        function: Any = getattr(node, "_forward_cls", None)  # a custom function
        if (inside := getattr(function, "nodes_inside", None)) is not None:
            yield from with_recomputed(inside(node))


def custom_functions(nodes: Iterable[Node]) -> list[str]:
    """Return the names of custom ``autograd.Function`` classes in a graph, except metagrad's and torch's."""
    classes: list[Any] = [type(n) for n in nodes if isinstance(n, BackwardCFunction)]
    functions: set[Any] = {cls._forward_cls for cls in classes}
    return sorted(f.__name__ for f in functions if f.__module__.split(".")[0] not in ("metagrad", "torch"))


def refuse_defects(call: str, loss: Tensor, params: Iterable[Tensor]) -> None:
    """Raise ``ValueError`` with every node that prevents a second derivative of a loss.

    The walk over the graph ends at the parameters. So it does not enter earlier steps of an unrolled loop.
    """
    behind = {node for param in params if (node := param.grad_fn) is not None}
    found = findings(graph_nodes([loss], behind), order=2, kinds=("cut", "error", "wrong"))
    if found:
        raise ValueError("\n".join(f"{call}: {finding}" for finding in found))


@functools.lru_cache(maxsize=4096)
def _rules_of(name: str) -> tuple[LintRule, ...]:
    return tuple(rule for rule in RULES if fnmatchcase(name, rule.node))
