"""The reverse pass of a training: the derivative of every step, from the last to the first.

The derivative of a step has two stages. The first stage differentiates the update of the optimizer. The
result includes a cotangent of the gradient. The second stage differentiates the gradient along this
cotangent, one micro-batch at a time. No graph is longer than one step. Every cotangent has a leading axis of
``k`` metrics, which share the graphs.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from metagrad.autograd.checks.lint import refuse_defects
from metagrad.autograd.derivatives.graph_vjp import graph_vjp
from metagrad.core.reach import placed
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import Params, Tree, dissect, is_differentiable, plus, tree_leaves
from metagrad.distributed.exchange import sums_over
from metagrad.optim.first_order.sgd import SGDRule
from metagrad.optim.hyperparameters import hyperparameters_in, with_hyperparameters
from metagrad.training.step import Gradient, Inputs, Part, State, Step, variable

Cotangents = list["Tensor | None"]
"""One tensor ``[k, *shape]`` for each tensor, or None if it is zero."""


class StateCotangents(NamedTuple):
    """Cotangents of the tensors of a state, each in the order of its tensors."""

    params: Cotangents
    optimizer: Cotangents
    buffers: Cotangents

    def sliced(self, first: int, last: int) -> StateCotangents:
        """Return the cotangents of some metrics."""
        return StateCotangents(*([c if c is None else c[first:last] for c in own] for own in self))


class Leaves(NamedTuple):
    """The tensors that a training can be differentiated with respect to, or one value for each of them.

    Attributes:
        params: Initial parameters.
        weights: Weights of the examples, one tensor.
        data: Tensors of the examples.
        rule: Hyperparameters of the functional optimizer.
        free: Other tensors that the loss or the model reads, such as parameters of the loss.
    """

    params: list[Any]
    weights: list[Any]
    data: list[Any]
    rule: list[Any]
    free: list[Any]

    def flat(self) -> list[Any]:
        """Return all values in one list."""
        return [value for values in self for value in values]

    def only(self, name: str) -> Leaves:
        """Return the structure with True for the floating point tensors of one name, and False for all others."""
        named = zip(self._fields, self, strict=True)
        return Leaves(*([field == name and is_differentiable(t) for t in own] for field, own in named))

    def filled(self, values: Iterable[Any]) -> Leaves:
        """Return the same structure with other values, in the order of :meth:`flat`."""
        supply = iter(values)
        return Leaves(*([next(supply) for _ in own] for own in self))


def leaves_of(params: Params, inputs: Inputs) -> Leaves:
    """Return the tensors that the result of a training depends on."""
    data = tree_leaves(inputs.examples.tensors) if inputs.examples.tensors is not None else []
    rule = list({id(t): t for _, t in hyperparameters_in(inputs.rule)}.values())
    free = list({id(t): t for _, t in inputs.places}.values())
    return Leaves(list(params.values()), [inputs.weights], data, rule, free)


def refuse_hidden_leaves(step: Step, inputs: Inputs, leaves: Leaves, state: State) -> None:
    """Raise ``ValueError`` if the loss depends on a tensor that requires grad but is not a leaf of the training.

    Tensors that are created inside the loss are freed with its graph.
    """
    if not (parts := step.parts(0)):  # another rank has all examples of the first step
        return
    part = parts[0]
    with torch.set_grad_enabled(inputs.examples.tensors is None):
        weights, divisor, batch = step.examples(part, inputs)
    params, free = {name: variable(p) for name, p in state.params.items()}, [variable(t) for t in leaves.free]
    buffers = {name: b.clone() for name, b in state.buffers.items()}
    places = with_leaves(inputs, leaves, leaves._replace(free=free)).places
    with torch.enable_grad(), step.model.holding(params, buffers):
        if free:  # a cache of the loss must hold the original tensors
            step.loss(weights.detach(), divisor.detach(), batch, part)
        with placed(places):
            loss = step.loss(weights.detach(), divisor.detach(), batch, part)
    known = {*params.values(), *free}
    ends = [
        leaf for node in graph_nodes([loss]) if isinstance(leaf := getattr(node, "variable", None), Tensor)
    ]
    hidden = [weakref.ref(leaf) for leaf in ends if leaf not in known]
    del batch, loss, known, ends
    if found := [tuple(leaf.shape) for ref in hidden if (leaf := ref()) is not None]:
        raise ValueError(
            f"Training(model, loss_fn, data): the loss reads a tensor of shape {found[0]} that requires grad. The "
            "tensor would get no gradient, because it is in no closure, attribute, default or global of the loss, "
            "the model or the transform. Store it in one of them, or detach it."
        )


def with_leaves(inputs: Inputs, leaves: Leaves, values: Leaves) -> Inputs:
    """Return inputs in which the tensors of ``leaves`` are replaced by ``values``."""
    new = {
        id(t): value for t, value in zip(leaves.rule + leaves.free, values.rule + values.free, strict=True)
    }
    rule = with_hyperparameters(inputs.rule, lambda t: new[id(t)]) if leaves.rule else inputs.rule
    places = [(place, new[id(t)]) for place, t in inputs.places]
    return Inputs(values.weights[0], inputs.examples.of(values.data), rule, places)


class PartGraph(NamedTuple):
    """The recorded gradient of a part of a mini-batch, as a function of leaves.

    Attributes:
        part: The part.
        gradient: The gradient, the loss and the buffers, with their graph.
        params: The parameters.
        buffers: The buffers before the forward pass.
        weights: The weights of the examples.
        divisor: The divisor of the weighted sum of the losses.
        data: The tensors of the batch.
        free: The other tensors that the loss or the model reads.
    """

    part: Part
    gradient: Gradient
    params: Params
    buffers: Params
    weights: Tensor
    divisor: Tensor
    data: list[Tensor]
    free: list[Tensor]


class Pullback:
    """Multiply cotangents by the transposed Jacobian of a step, and accumulate the cotangents of the inputs.

    Args:
        step: The step.
        inputs: The inputs of the training.
        leaves: The tensors that the training is a function of.
        wanted: For each of these tensors, True if it is differentiated.
        count: Number of cotangents, k.

    Attributes:
        total: Accumulated cotangents of the leaves, without the initial parameters.
    """

    def __init__(self, step: Step, inputs: Inputs, leaves: Leaves, wanted: Leaves, count: int) -> None:
        self.step = step
        self.inputs = inputs
        self.leaves = leaves
        self.wanted = wanted
        self.count = count
        self.total = leaves.filled([None] * len(leaves.flat()))
        self.is_checked = False

    def record(self, state: State, part: Part) -> PartGraph:
        """Return the gradient of a part with its graph."""
        params = {name: variable(p) for name, p in state.params.items()}
        buffers = {name: variable(b) for name, b in state.buffers.items()}
        with torch.no_grad():
            weights, divisor, batch = self.step.examples(part, self.inputs)
        weights.requires_grad_(self.wanted.weights[0])
        divisor.requires_grad_(self.wanted.weights[0] and self.step.average == "weights")
        data = dissect(batch)[0]
        for tensor, is_wanted in zip(data, self.wanted.data, strict=False):
            tensor.requires_grad_(is_wanted)
        with torch.enable_grad():
            own = {name: b.clone() for name, b in buffers.items()}
        copies = {name: (b, b._version, b.grad_fn) for name, b in own.items()}
        versions = {name: p._version for name, p in params.items()}
        free = [variable(t) for t in self.leaves.free]
        places = with_leaves(self.inputs, self.leaves, self.leaves._replace(free=free)).places
        with self.step.model.holding(params, own), placed(places):
            gradient = self.step.gradient(params, own, weights, divisor, batch, part, create_graph=True)
        if not self.is_checked:
            self.is_checked = True
            refuse_defects("Training(...)", gradient.loss, params.values())
        for name, p in params.items():
            if p._version != versions[name]:
                raise ValueError(
                    f"Training(...): the model writes its parameter {name!r} in place, as nn.Embedding does with "
                    "max_norm. The derivative of this write would be lost. Write a copy."
                )
        for name, copy in copies.items():
            _refuse_detached(name, buffers[name], gradient.buffers[name], *copy)
        return PartGraph(part, gradient, params, buffers, weights, divisor, data, free)

    def __call__(
        self,
        state: State,
        t: int,
        after: StateCotangents,
        loss: Tensor | None,
        graphs: list[PartGraph] | None = None,
    ) -> tuple[StateCotangents, Tensor]:
        """Return the cotangents of the state before step ``t``, and the loss of the step.

        Args:
            state: The state before the step.
            t: Number of the step.
            after: Cotangents of the state after the step.
            loss: Cotangents of the loss of the step, ``[k]``, or None.
            graphs: The recorded parts of the step, or None.
        """
        parts = self.step.parts(t)
        if graphs is None and len(parts) == 1:
            graphs = [self.record(state, parts[0])]
        if graphs is None:
            gradient = self.step.whole_gradient(state, t, self.inputs)
        else:
            gradient = self.step.total(state, [graph.gradient.detached() for graph in graphs])
        along, params, optimizer = self._through_update(state, gradient.grads, after)
        along = [
            c if c is None else c.to(g.dtype) for c, g in zip(along, gradient.grads.values(), strict=True)
        ]
        own: Cotangents = [None] * len(state.params)
        buffers: Cotangents = [None] * len(state.buffers)
        for i, part in enumerate(parts):
            graph = self.record(state, part) if graphs is None else graphs[i]
            own_params, own_buffers = self._through_gradient(graph, along, loss, after.buffers)
            own, buffers = list(map(plus, own, own_params)), list(map(plus, buffers, own_buffers))
        params = list(map(plus, params, self.over_ranks(own, state.params.values())))
        return StateCotangents(params, optimizer, buffers), gradient.loss

    def over_ranks(self, own: Cotangents, like: Iterable[Tensor]) -> Cotangents:
        """Return the sums of cotangents over ranks that share each mini-batch."""
        if self.step.group is None:
            return own
        like = [x.detach().expand(self.count, *x.shape) for x in like]
        return [*sums_over(self.step.group, own, like)]

    def collected(self, params: Cotangents) -> list[Tensor | None]:
        """Return the cotangents of all leaves, given the cotangents of the initial parameters.

        Updates are the same on all ranks, so only the cotangents of weights, data and free tensors are
        summed.
        """
        found, leaves = self.total._replace(params=params).flat(), self.leaves.flat()
        masks = self.wanted, self.leaves.only("params"), self.leaves.only("rule")
        own = [i for i, mask in enumerate(zip(*(m.flat() for m in masks), strict=True)) if mask == (1, 0, 0)]
        sums = self.over_ranks([found[i] for i in own], [leaves[i] for i in own])
        whole = dict(zip(own, sums, strict=True))
        return [whole.get(i, value) for i, value in enumerate(found)]

    def through_init(self, params: Params, first: StateCotangents) -> Cotangents:
        """Return the cotangents of the initial parameters. The first state of the optimizer may depend on them."""
        found = self._through_rule(lambda rule, params: rule.init(params), (params,), first.optimizer)
        return list(map(plus, first.params, found))

    def _through_update(
        self, state: State, grads: Params, after: StateCotangents
    ) -> tuple[Cotangents, Cotangents, Cotangents]:
        """Return the cotangents of the inputs of the update: gradient, parameters and optimizer state."""
        found = self._through_rule(
            lambda rule, grads, params, optimizer: rule.update(grads, optimizer, params),
            (grads, state.params, state.optimizer),
            [*after.params, *after.optimizer],
        )
        size = len(grads)
        return found[:size], found[size : 2 * size], found[2 * size :]

    def _through_rule(
        self, function: Callable[..., Tree], args: tuple[Tree, ...], cotangents: Cotangents
    ) -> Cotangents:
        """Multiply cotangents of ``function(rule, *args)`` by its transposed Jacobian with respect to ``args``.

        The function is differentiated in float64, because the first step of Adam cancels in float32.
        """
        hyper = {id(t): self._leaf(t) for t in self.leaves.rule}
        rule = with_hyperparameters(self.inputs.rule, lambda t: hyper[id(t)]) if hyper else self.inputs.rule
        tensors, structure = dissect(args)
        own = [self._leaf(tensor) for tensor in tensors]
        with torch.enable_grad():
            results = dissect(function(rule, *structure.fill(own)))[0]
        found = vjp(results, [*own, *hyper.values()], cotangents, self.count)
        _add(self.total.rule, found[len(tensors) :])
        return found[: len(tensors)]

    def widened(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the dtype in which updates are differentiated."""
        is_linear = isinstance(self.inputs.rule, SGDRule)  # nothing cancels
        return tensor if is_linear or not is_differentiable(tensor) else tensor.to(torch.float64)

    def _leaf(self, tensor: Tensor) -> Tensor:
        return variable(self.widened(tensor))

    def _through_gradient(
        self, graph: PartGraph, along: Cotangents, loss: Tensor | None, buffers: Cotangents
    ) -> tuple[Cotangents, Cotangents]:
        """Return the cotangents of the parameters and the buffers, through the gradient of a part."""
        gradient = graph.gradient
        outputs = [*gradient.grads.values(), gradient.loss, *gradient.buffers.values()]
        inputs = [*graph.params.values(), *graph.buffers.values()]
        inputs += [graph.weights, graph.divisor, *graph.data, *graph.free]
        unused = {name: b.detach().clone() for name, b in gradient.buffers.items()}
        with self.step.model.holding(graph.params, unused):
            found = iter(vjp(outputs, inputs, [*along, loss, *buffers], self.count))
        params, own = [next(found) for _ in graph.params], [next(found) for _ in graph.buffers]
        self._scatter(graph.part, next(found), next(found), [next(found) for _ in graph.data])
        _add(self.total.free, list(found))
        return params, own

    def _scatter(self, part: Part, weights: Tensor | None, divisor: Tensor | None, data: Cotangents) -> None:
        """Add the cotangents of a part to the rows of its examples."""
        self._add_rows(self.total.weights, 0, self.leaves.weights[0], part.rows, weights)
        if divisor is not None:  # the sum of the weights
            rows = self.step.stream.rows(part.t)
            shape = len(rows), *self.leaves.weights[0].shape[1:]
            spread = divisor.reshape(-1, *[1] * len(shape)).expand(-1, *shape)
            self._add_rows(self.total.weights, 0, self.leaves.weights[0], rows, spread)
        for place, found in enumerate(data[: len(self.leaves.data)]):
            self._add_rows(self.total.data, place, self.leaves.data[place], part.rows, found)

    def _add_rows(
        self, total: Cotangents, place: int, like: Tensor, rows: Tensor, found: Tensor | None
    ) -> None:
        if found is None:
            return
        if (own := total[place]) is None:
            own = total[place] = like.detach().new_zeros(self.count, *like.shape)
        own.index_add_(1, rows.to(own.device), found.to(own.dtype))


def _refuse_detached(
    name: str, before: Tensor, after: Tensor, copy: Tensor, version: int, node: Node | None
) -> None:
    """Raise ``ValueError`` if a forward pass changed a buffer without a graph."""
    is_written = after is not copy or after._version != version
    is_detached = not after.requires_grad or after.grad_fn is node
    if is_differentiable(before) and is_written and is_detached and not torch.equal(after, before):
        raise ValueError(
            f"Training(...): the model writes its buffer {name!r} without a graph, as under torch.no_grad(), so the "
            "derivative through it would be lost. Put the module that writes it into evaluation mode, or write it "
            "with a graph."
        )


def _add(total: Cotangents, found: Sequence[Tensor | None]) -> None:
    total[:] = map(plus, total, found)


def vjp(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], count: int
) -> Cotangents:
    """Multiply ``count`` cotangents of each output by the transposed Jacobian of a graph, which is freed.

    Returns:
        ``[count, *shape]`` for each input. None for an input that no output depends on.
    """
    wanted = [i for i, tensor in enumerate(inputs) if tensor.requires_grad]
    own = [inputs[i] for i in wanted]
    result: Cotangents = [None] * len(inputs)
    if count == 1:
        single = [c if c is None else c[0] for c in cotangents]
        found = [f if f is None else f[None] for f in graph_vjp(outputs, own, single, retain_graph=False)]
    else:
        found = _batched(outputs, own, cotangents, count)
    for place, value in zip(wanted, found, strict=True):
        result[place] = value
    return result


def _batched(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], count: int
) -> Cotangents:
    """Multiply all cotangents in one backward pass, or sequentially if an operation cannot be batched."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop")
        try:
            return graph_vjp(outputs, inputs, cotangents, batched=True, retain_graph=True)
        except (RuntimeError, NotImplementedError, UserWarning):
            pass  # if the error has another cause, a single product raises it again
    rows = [
        graph_vjp(outputs, inputs, [c if c is None else c[i] for c in cotangents], retain_graph=True)
        for i in range(count)
    ]
    columns = zip(*rows, strict=True)
    return [None if column[0] is None else torch.stack(column) for column in columns]  # type: ignore[arg-type]
