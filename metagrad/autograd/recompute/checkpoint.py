"""Gradient checkpointing that is closed under differentiation.

A checkpointed call stores only its operands. Its derivative is the vector-Jacobian product of the call, which is also
a function of operands. A derivative that will be differentiated again is also checkpointed. So only operands
are stored at every order. Storing the graph of the first derivative would store everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

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
    """A deterministic function of a flat list of tensors. An output is None if its derivative is zero."""

    def __call__(self, tensors: Sequence[Tensor], /) -> Sequence[Tensor | None]:
        """Compute."""
        ...


def checkpoint(fn: Callable[..., T], *args: Tree, **kwargs: Tree) -> T:
    """Call ``fn(*args, **kwargs)``, store only its inputs, and recompute the rest in the backward pass.

    This is gradient checkpointing that is exact at every order. The gradient is also recomputed: its graph
    (``create_graph=True``) is not stored, at any order. The recomputation sees the same state as the call:

    - Random numbers of torch, NumPy and Python, and of generators that ``fn`` can reach.
    - Autocast state, and flags of torch that choose dtypes and kernels.
    - Tensors that ``fn`` can reach through its closure, its defaults, globals, modules and other objects. An example
      is a weight that :func:`torch.func.functional_call` puts into a module during an outer call.
    - Flags, numbers, containers and buffers of the modules that ``fn`` can reach. The recomputation leaves them
      unchanged, so that buffers are updated once.

    A recomputation that does not repeat the call raises an error. The results are compared, and the kinds and number
    of operations in their graph.

    A tensor that leaves ``fn`` through an attribute or a list, not through the return value, keeps its own graph. Its
    gradient is correct, but that graph is stored.

    Args:
        fn: A function of pytrees of tensors, or a module, that repeats its computation when it is called again.
        *args: Pytrees of tensors and constants.
        **kwargs: Pytrees of tensors and constants.

    Returns:
        The return value of ``fn``, a pytree of tensors and constants.

    Raises:
        ValueError: ``fn`` writes in place into an argument or into a tensor that requires grad. It is also raised if
            ``fn`` writes into a tensor of more than 16384 entries that another function made.
        RuntimeError: In the backward pass, if a tensor that ``fn`` reads was modified in place, or if ``fn`` does not
            repeat its computation.

    Note:
        A change is not detected if it affects neither the results nor the differentiable operations. Examples are a
        number that only a hook reads and a number that scales a result of zero.
        Numbers are compared bitwise in one CPU thread and under :func:`torch.use_deterministic_algorithms`, and to
        rounding otherwise. Side effects of ``fn`` on objects other than modules, and lists and dicts among the
        arguments, happen again at each recomputation.

        Inside a ``torch.func`` transform (``vmap``, ``grad``, ...) and in forward mode, ``fn`` is called without
        recomputation. Its graph is stored, with a warning. Put the checkpoint around the transform.

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
    """Call a function and keep only its inputs. See :func:`~.replay.record` for the arguments."""
    recording = record(fn, args, kwargs, name=name, state=state, num_kept=num_kept)
    return attach(recording.call, recording.tensors, recording.outputs, recording.structure)


def cannot_recompute() -> str | None:
    """Return the name of an active transform or mode that does not allow recomputation, or None."""
    if _torch.functorch_is_active():
        return "inside a torch.func transform"
    if _torch.forward_level() >= 0:
        return "inside forward-mode differentiation"
    return None


def attach(
    call: TensorFunction, tensors: Sequence[Tensor], outputs: Sequence[Tensor], structure: Structure
) -> Tree:
    """Return the known outputs of a call with a graph: a checkpointed function of ``tensors``.

    Outputs that do not require grad are constants.
    """
    return structure.fill(_Checkpointed.apply(call, outputs, *tensors))


def recomputed(call: TensorFunction, operands: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Run a call and store only its operands for its derivatives."""
    return _Checkpointed.apply(_ComparedCall(call), None, *operands)


class Vjp:
    r"""The vector-Jacobian product of a call: :math:`(x, \bar y) \mapsto \bar y^\top \partial y / \partial x`.

    Args:
        call: The function :math:`y(x)`.
        num_tensors: The number of first operands that are :math:`x`. The rest are :math:`\bar y`.
        wanted: The numbers of the operands to differentiate with respect to.
        present: The numbers of the outputs that have a cotangent.
    """

    def __init__(
        self, call: TensorFunction, num_tensors: int, wanted: Sequence[int], present: Sequence[int]
    ) -> None:
        self.call = call
        self.num_tensors = num_tensors
        self.wanted = wanted
        self.present = present
        # The function may read a leaf from an unknown place. No other tensor can be substituted there.
        self.leaves: dict[int, Tensor] = getattr(call, "leaves", {})

    def __call__(self, operands: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return one cotangent for each wanted tensor, or None if the outputs do not depend on it."""
        create_graph = torch.is_grad_enabled()
        tensors, cotangents = operands[: self.num_tensors], operands[self.num_tensors :]
        with torch.enable_grad():
            inputs = [_private(t, create_graph) for t in tensors]
            outputs = self.call(inputs)
        own = {i: leaf for i in self.wanted if (leaf := self.leaves.get(i)) is not None}
        ends = [_end(outputs[i]) for i in self.present]
        del outputs
        found = graph_vjp(
            ends,
            [*(inputs[i] for i in self.wanted), *own.values()],
            cotangents,
            create_graph=create_graph,
        )
        natively = dict(zip(own, found[len(self.wanted) :], strict=True))
        return [plus(gradient, natively.get(i)) for i, gradient in zip(self.wanted, found, strict=False)]


class _ComparedCall:
    """A call that compares its results with the results of its first run, since hooks may change.

    The comparison allows rounding errors. Torch computes some derivatives by other operations if they need a graph.
    """

    def __init__(self, call: TensorFunction) -> None:
        self.call = call
        self.first: Fingerprint | None = None

    @property
    def leaves(self) -> dict[int, Tensor]:
        """The leaf that an operand was in the first run, by the number of the operand."""
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
    """Recompute a call and compute its vector-Jacobian product, which is differentiable in grad mode.

    Returns:
        One cotangent for each of ``tensors``. None if it is not needed, or if no result depends on the tensor.
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


def _end(output: Tensor | None) -> GradientEdge | None:
    """Return the edge at which the backward pass of an output begins.

    The edge does not keep the values of the output alive.
    """
    return get_gradient_edge(output) if output is not None and output.requires_grad else None


def _private(tensor: Tensor, create_graph: bool) -> Tensor:
    """Return a separate tensor for each operand. A tensor in two arguments has two derivatives."""
    if create_graph and tensor.requires_grad:
        return tensor.view_as(tensor)
    return fresh_leaf(tensor)


class _CallContext(Context, Protocol):
    """The context of a checkpointed call."""

    call: TensorFunction


class _Checkpointed(Function):
    """A call that runs again from its operands for each derivative."""

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
        """Run the call again and yield the nodes of its graph."""
        with torch.enable_grad():
            outputs = ctx.call([fresh_leaf(tensor) for tensor in ctx.saved_tensors])
        return graph_nodes([output for output in outputs if output is not None])
