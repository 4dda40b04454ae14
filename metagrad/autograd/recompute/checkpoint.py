"""Recomputation instead of storage, closed under differentiation.

A recomputed call keeps its operands and nothing else. Its derivative is the vector-Jacobian product of the
call, which is again a function of operands alone: asked for a derivative that can be differentiated again, it
is recomputed in its turn. So memory stays at the operands at every order, where keeping the graph of the first
derivative would store everything after all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node

from metagrad.autograd.derivatives.graph_vjp import graph_vjp
from metagrad.autograd.recompute.fingerprint import Fingerprint
from metagrad.autograd.recompute.replay import CallState, record
from metagrad.core import _torch
from metagrad.core._torch import Context, Function
from metagrad.core.checks import check_function, warn
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import Structure, Tree, fresh_leaf, plus

T = TypeVar("T")


class TensorFunction(Protocol):
    """A deterministic function of a flat list of tensors; an output may be None where nothing flows."""

    def __call__(self, tensors: Sequence[Tensor], /) -> Sequence[Tensor | None]:
        """Compute."""
        ...


def checkpoint(fn: Callable[..., T], *args: Tree, **kwargs: Tree) -> T:
    """Call ``fn(*args, **kwargs)``, keeping its inputs and recomputing everything else when differentiated.

    It is exact at every order, and recomputes at every order: the graph of a gradient (``create_graph=True``) is not
    stored either. The recomputation sees what the call saw:

    - the random numbers of torch, NumPy and Python, and of generators that ``fn`` can reach;
    - autocast, and the flags of torch that choose dtypes and kernels;
    - the tensors that ``fn`` can reach through its closure, its defaults, globals, modules and other objects, such as
      the weights that :func:`torch.func.functional_call` put into a module for the duration of an outer call;
    - the flags, numbers, containers and buffers of the modules that ``fn`` can reach, which it leaves as it finds
      them. Buffers that are written in place or bound anew are updated once.

    A recomputation that does not repeat the call raises an error. Its results are compared, and the kinds and number
    of the operations in their graph.

    A tensor that leaves ``fn`` by another way than its return value (an attribute, a list, also one that is an
    argument) keeps its own graph, so that its gradient is right as well. That graph is stored.

    Args:
        fn: A function of trees of tensors, or a module, that repeats its computation when it is called again.
        *args: Trees of tensors and constants.
        **kwargs: Likewise.

    Returns:
        What ``fn`` returns: a tree of tensors and constants.

    Raises:
        ValueError: ``fn`` writes in place into its arguments, into a tensor that requires grad, or into a tensor of
            more than 16384 entries that it did not make.
        RuntimeError: On differentiation, if something ``fn`` reads was modified in place since, or if ``fn`` does
            not repeat what it did.

    Note:
        A change is not detected if it shows neither in the results nor in the operations that are differentiable: a
        number that only a hook reads, a number that scales a result of zero, or one by which a gradient inside ``fn``
        is scaled that the results do not show.
        Numbers are compared bit by bit in one thread of a CPU and under :func:`torch.use_deterministic_algorithms`,
        and elsewhere to rounding. Side effects of ``fn`` on objects that are neither modules nor lists and dicts
        among the arguments (it appends to a list of its own) happen again at each recomputation.

        Inside a ``torch.func`` transform (``vmap``, ``grad``, ...) and in forward mode ``fn`` is called without
        recomputation and its graph is stored, with a warning: put the checkpoint around the transform.

    Example:
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> y = metagrad.checkpoint(lambda x: x**3, x)
        >>> (g,) = torch.autograd.grad(y, x, create_graph=True)
        >>> g.item(), torch.autograd.grad(g, x)[0].item()
        (12.0, 12.0)

    References:
        Griewank, Walther, "Algorithm 799: Revolve", TOMS 26(1), 2000; Chen et al., "Training deep nets with
        sublinear memory cost", arXiv:1604.06174.
    """
    check_function("checkpoint(fn, ...)", "fn", fn)
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    if (why := cannot_recompute()) is not None:
        warn(
            f"checkpoint(fn, ...): called {why}, where nothing can be recomputed; its graph is stored. Put the "
            "checkpoint around the transform."
        )
        return fn(*args, **kwargs)
    return recording_call(fn, args, kwargs, name="checkpoint(fn, ...)")


def recording_call(
    fn: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    state: CallState | None = None,
    num_kept: int = 0,
) -> T:
    """Call a function and keep only its inputs. The arguments are those of :func:`~.replay.record`."""
    recording = record(fn, args, kwargs, name=name, state=state, num_kept=num_kept)
    return attach(recording.call, recording.tensors, recording.outputs, recording.structure)


def cannot_recompute() -> str | None:
    """Name the transform or mode that is active and does not allow recomputation; None if there is none."""
    if _torch.functorch_is_active():
        return "inside a torch.func transform"
    if _torch.forward_level() >= 0:
        return "inside forward-mode differentiation"
    return None


def attach(
    call: TensorFunction, tensors: Sequence[Tensor], outputs: Sequence[Tensor], structure: Structure
) -> Tree:
    """Put the known outputs of a call on the tape, as a recomputed function of its tensors.

    Outputs that do not require grad are constants.
    """
    return structure.fill(_Recomputed.apply(call, outputs, *tensors))


def recomputed(call: TensorFunction, operands: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Run a call so that only its operands are kept for its derivatives."""
    return _Recomputed.apply(_Repeatable(call), None, *operands)


class Vjp:
    r"""The vector-Jacobian product of a call: :math:`(x, \bar y) \mapsto \bar y^\top \partial y / \partial x`.

    Args:
        call: The function :math:`y(x)`.
        num_tensors: How many of the operands are :math:`x`; the others are :math:`\bar y`.
        wanted: Which of :math:`x` to differentiate with respect to.
        present: Which outputs the cotangents belong to.
    """

    def __init__(
        self, call: TensorFunction, num_tensors: int, wanted: Sequence[int], present: Sequence[int]
    ) -> None:
        self.call = call
        self.num_tensors = num_tensors
        self.wanted = wanted
        self.present = present
        # The function may read a leaf in a place that is not known, where no other tensor stands for it.
        self.leaves: dict[int, Tensor] = getattr(call, "leaves", {})

    def __call__(self, operands: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return one cotangent for each wanted tensor, None where it has no influence."""
        create_graph = torch.is_grad_enabled()
        tensors, cotangents = operands[: self.num_tensors], operands[self.num_tensors :]
        with torch.enable_grad():
            inputs = [_private(t, create_graph) for t in tensors]
            outputs = self.call(inputs)
        own = {i: leaf for i in self.wanted if (leaf := self.leaves.get(i)) is not None}
        found = graph_vjp(
            [outputs[i] for i in self.present],
            [*(inputs[i] for i in self.wanted), *own.values()],
            cotangents,
            create_graph=create_graph,
        )
        natively = dict(zip(own, found[len(self.wanted) :], strict=True))
        return [plus(gradient, natively.get(i)) for i, gradient in zip(self.wanted, found, strict=False)]


class _Repeatable:
    """A call whose results are compared with those of its first run: hooks may differ in a backward pass as well.

    They are compared to rounding: with a graph of its own, some derivatives are computed by other operations.
    """

    def __init__(self, call: TensorFunction) -> None:
        self.call = call
        self.first: Fingerprint | None = None

    @property
    def leaves(self) -> dict[int, Tensor]:
        """The leaves that the operands of the call were."""
        return getattr(self.call, "leaves", {})

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Compute, and compare."""
        results = self.call(tensors)
        if self.first is None:
            self.first = Fingerprint(results)
        elif (difference := self.first.difference(results, exact=False)) is not None:
            raise RuntimeError(
                f"A gradient did not repeat when it was recomputed, to be differentiated again: {difference}. "
                "Hooks on gradients and backward methods must do the same each time."
            )
        return results


def vjp(
    call: TensorFunction,
    tensors: Sequence[Tensor],
    needed: Sequence[bool],
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Compute the vector-Jacobian product of a call, recomputing it; differentiable where grad mode is on.

    Returns:
        One cotangent for each of ``tensors``; None where it is not needed, or the results do not depend on it.
    """
    wanted = [i for i, need in enumerate(needed) if need]
    present = [i for i, cotangent in enumerate(cotangents) if cotangent is not None]
    result: list[Tensor | None] = [None] * len(tensors)
    if wanted and present:
        product = Vjp(call, len(tensors), wanted, present)
        operands = [*tensors, *(c for c in cotangents if c is not None)]
        grads = recomputed(product, operands) if torch.is_grad_enabled() else product(operands)
        for index, gradient in zip(wanted, grads, strict=True):
            result[index] = gradient
    return result


def _private(tensor: Tensor, create_graph: bool) -> Tensor:
    """Return a distinct tensor for each operand: the same tensor in two arguments has two derivatives."""
    if create_graph and tensor.requires_grad:
        return tensor.view_as(tensor)
    return fresh_leaf(tensor)


class _CallContext(Context, Protocol):
    """What the derivatives of a call have."""

    call: TensorFunction


class _Recomputed(Function):
    """A call whose derivatives are recomputed from its operands."""

    @staticmethod
    def forward(
        ctx: _CallContext, call: TensorFunction, outputs: Sequence[Tensor] | None, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*tensors)
        if outputs is None:
            return tuple(call(tensors))
        results = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(
            *(r for r, output in zip(results, outputs, strict=True) if not output.requires_grad)
        )
        return results

    @staticmethod
    def backward(ctx: _CallContext, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *vjp(ctx.call, ctx.saved_tensors, ctx.needs_input_grad[2:], cotangents))

    @staticmethod
    def nodes_inside(ctx: _CallContext) -> Iterator[Node]:
        """Walk the graph of the call, which is run again for that."""
        with torch.enable_grad():
            outputs = ctx.call([fresh_leaf(tensor) for tensor in ctx.saved_tensors])
        return graph_nodes([output for output in outputs if output is not None])
