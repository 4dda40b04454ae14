"""Training as a differentiable function of all tensors that require grad."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from metagrad.autograd.derivatives.graph_vjp import graph_vjp
from metagrad.autograd.unrolling.plan import Plan, states_of
from metagrad.core._torch import Function
from metagrad.core.budget import Memory, checked_memory, free_bytes
from metagrad.core.checks import (
    check_choice,
    check_count,
    check_function,
    check_type,
    dtypes_explained,
    refuse,
)
from metagrad.core.modules import check_substitutable, refuse_wrapped
from metagrad.core.reach import Place, ReachableObjects
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import LossFn, Params, Tree, dissect, is_differentiable
from metagrad.optim.rule import Rule
from metagrad.optim.transforms.chain import check_rule
from metagrad.training.reverse import Cotangents, Leaves, StateCotangents, leaves_of, vjp
from metagrad.training.step import Inputs, Model, Step, variable
from metagrad.training.stream import Examples, Stream
from metagrad.training.trajectory import Report, Trajectory

Transform = Callable[[Tree, Tree], "tuple[Tree, Tree]"]
Metrics = Callable[[Callable[..., Any]], Tensor]
"""Function of a callable model that returns the metrics, ``[k]``."""


class Training:
    r"""Mini-batch training of a model, as a differentiable function.

    A call trains a copy of the model and returns it as :class:`Trained`. The result is differentiable with
    respect to all inputs that require grad: weights of the examples, the data, hyperparameters of the
    functional optimizer, initial parameters, and tensors that the loss reads. The derivative is exact. The
    model itself is never modified.

    .. math:: \theta_{t+1} = \mathrm{update}\Big(\theta_t, \nabla_\theta \frac{1}{B} \sum_{i \in b_t} w_i \,
              \ell_i(\theta_t)\Big)

    The order of the examples and all random numbers are functions of the seed and the step. Each module
    trains in the mode (training or evaluation) that it has at construction. Running statistics of batch norms
    are part of the state, so a metric in evaluation mode has the correct derivative.

    Args:
        model: A module in training mode. Its parameters that require grad are trained.
        loss_fn: ``loss_fn(output, y)`` returns one loss for each example, ``[batch]`` or ``[batch, ...]``. It may
            also return the mean from a loss of ``torch.nn.functional``, such as ``F.cross_entropy``.
        data: A pair ``(x, y)`` of pytrees of tensors whose first axis counts examples, or a map-style dataset of
            pairs. The model is called as ``model(x)``, ``model(*x)`` or ``model(**x)``.
        optimizer: A functional optimizer of :mod:`metagrad.optim.rules`.
        batch_size: Examples in a mini-batch.
        epochs: Number of epochs. Give either ``epochs`` or ``steps``.
        steps: Number of steps.
        seed: Seed of the order of the examples and of random numbers.
        transform: Function ``transform(x, y)`` of each mini-batch, such as an augmentation, or None.
        average: ``"batch"`` divides the weighted sum of the losses by the number of examples of the mini-batch.
            ``"weights"`` divides it by the sum of their weights.
        micro_batch: Maximum number of examples whose graph is in memory at a time. None means the whole mini-batch.
        order: Indices of the examples of each step, int64 ``[steps, batch]``. They replace the shuffled
            order.
        group: Process group whose ranks share the examples of each mini-batch, such as
            ``torch.distributed.group.WORLD``. Every rank must construct the same training and make the same
            calls. All ranks get the same result. None computes all examples in this process.

    Raises:
        ValueError: An argument is out of range, or the model is in evaluation mode.
        TypeError: The data is an iterator, or ``optimizer`` is not a functional optimizer.

    Example:
        The derivative of the trained weight with respect to the weight of each example:

        >>> x, y = torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0], [3.0]])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> training = metagrad.Training(
        ...     model, torch.nn.functional.mse_loss, (x, y), optimizer=metagrad.optim.rules.sgd(lr=0.5),
        ...     batch_size=2, steps=1
        ... )
        >>> weights = torch.ones(2, requires_grad=True)
        >>> trained = training(weights)
        >>> trained(torch.ones(1, 1)).item(), metagrad.grad(trained(torch.ones(1, 1)), weights).tolist()
        (2.0, [0.5, 1.5])

    References:
        Maclaurin, Duvenaud, Adams, "Gradient-based hyperparameter optimization through reversible learning",
        ICML 2015; Engstrom et al., "Optimizing ML training with metagradient descent", arXiv:2503.13751.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        data: Any,
        *,
        optimizer: Rule,
        batch_size: int,
        epochs: int | None = None,
        steps: int | None = None,
        seed: int = 0,
        transform: Callable[[Tree, Tree], tuple[Tree, Tree]] | None = None,
        average: str = "batch",
        micro_batch: int | None = None,
        order: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        call = "Training(...)"
        check_type("Training(model)", model, nn.Module)
        refuse_wrapped("Training(model)", model)
        check_substitutable("Training(model)", model.modules())
        if any(hasattr(module, "_orig_mod") for module in model.modules()):
            refuse("Training(model)", "the model as it was before torch.compile", type(model).__name__)
        if not model.training:
            refuse("Training(model)", "a model in training mode, as after model.train()", "evaluation mode")
        check_function(call, "loss_fn", loss_fn)
        check_choice("Training(average)", average, ("batch", "weights"))
        check_count("Training(micro_batch)", micro_batch, optional=True)
        self.model = Model(model)
        if not self.model.params():
            refuse("Training(model)", "a parameter that requires grad", None)
        self.examples = Examples(data)
        check_rule("Training(...)", optimizer, "optimizer")
        self.optimizer = optimizer
        size = min(check_count("Training(batch_size)", batch_size), self.examples.size)
        order = _checked_order(order, self.examples.size)
        self.steps = _number_of_steps(epochs, steps, -(-self.examples.size // size), order)
        stream = Stream(self.examples.size, size, self.steps, seed, order)
        self.step = Step(self.model, loss_fn, stream, average, micro_batch, transform, group)

    def __repr__(self) -> str:
        name, steps = type(self.model.module).__name__, self.steps
        return f"Training({name}, {self.num_examples} examples, {steps} steps, {self.optimizer})"

    @property
    def num_examples(self) -> int:
        """Number of examples, n."""
        return self.examples.size

    def __call__(
        self,
        weights: Tensor | None = None,
        *,
        data: tuple[Tree, Tree] | None = None,
        params: Params | None = None,
        optimizer: Rule | None = None,
        memory: Memory = "log",
        states: int | None = None,
        offload: str | Path | None = None,
    ) -> Trained:
        r"""Train.

        ========= ============================= ===================================================
        memory    stores                        extra computation
        ========= ============================= ===================================================
        "full"    the graph of every step       none
        "step"    the state of every step       each step once more, to record its graph
        "sqrt"    :math:`2 \sqrt{T}` states     each step twice more
        "log"     :math:`2 \log_2 T` states     each step 2 to 3.5 times more for T up to 10,000
        bytes     as many states as fit         as little as possible
        "auto"    half of the free memory       as little as possible
        ========= ============================= ===================================================

        All modes return bitwise identical results. ``"full"`` can round differently for layers such as group
        norms, because differentiable gradients use other kernels.

        Args:
            weights: Weights of the examples, ``[n]``, or of the terms of their losses, ``[n, ...]``. The default
                is 1.
            data: Other data of the same form as ``data`` of the constructor.
            params: Initial parameters by name. The default is the parameters of the model.
            optimizer: Another functional optimizer.
            memory: Which states are stored for the backward pass.
            states: Number of stored states. It replaces ``memory``.
            offload: Storage of the states. ``"cpu"`` is pinned host memory, for a model on a GPU. A path
                names a folder for the states. If the program is interrupted, even in the backward pass, the
                same call resumes from the folder. The result is bitwise identical.

        Returns:
            The trained model.

        Raises:
            ValueError: The shapes of the weights, the data or the parameters do not fit. The folder belongs
                to another training run, or a file in it is damaged. The ranks of ``group`` have different
                parameters, data, weights or metrics.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeError("Training(...)(): cannot run in torch.inference_mode(). Use torch.no_grad().")
        if self.step.group is not None and (memory == "auto" or offload not in (None, "cpu")):
            refuse(
                "Training(..., group)(memory, offload)",
                'another mode than "auto" and no folder, because all ranks must keep the same states',
                (memory, offload),
            )
        examples = self.examples if data is None else self._checked_data(data)
        own = self.model.params() if params is None else self._checked_params(params)
        weights = self._checked_weights(weights, next(iter(own.values())))
        rule = self.optimizer if optimizer is None else optimizer
        check_rule("Training(...)()", rule, "optimizer")
        inputs = Inputs(weights, examples, rule, self._places(own))
        leaves = leaves_of(own, inputs)
        wanted = leaves.filled([t.requires_grad and torch.is_grad_enabled() for t in leaves.flat()])
        plan = self.plan(memory, states, params=own, optimizer=rule)
        full = memory == "full" and states is None
        with dtypes_explained("Training(...)(data)", own.values(), examples.tensors):
            trajectory = Trajectory(self.step, inputs, leaves, wanted, own, None if full else plan, offload)
        return Trained(self, trajectory)

    def plan(
        self,
        memory: Memory = "log",
        states: int | None = None,
        *,
        params: Params | None = None,
        optimizer: Rule | None = None,
    ) -> Plan:
        """Return how many states are stored and how many steps run, without training.

        Args:
            memory: Which states are stored, as in :meth:`__call__`.
            states: Number of states. It replaces ``memory``.
            params: Initial parameters by name.
            optimizer: The functional optimizer.
        """
        params = self.model.params() if params is None else params
        call = "Training(...)(memory)"
        mode = checked_memory(call, memory)
        with torch.no_grad():
            first = params, (optimizer or self.optimizer).init(params), self.model.buffers()
        tensors = dissect(first)[0]
        if mode == "auto":
            mode = free_bytes(tensors[0].device) // 2
        size = sum(tensor.nbytes for tensor in tensors)
        check_count("Training(...)(states)", states, optional=True)
        count = states_of(call, mode, self.steps, size) if states is None else min(states, self.steps)
        return Plan(self.steps, count)

    def _places(self, params: Params) -> list[tuple[Place, Tensor]]:
        """Return the tensors that require grad among those that the loss, the model and the transform can reach."""
        known = {id(t) for t in (*params.values(), *self.model.params().values())}
        given = self.step.loss_fn, self.model.module, self.step.transform
        reached = [found for f in given if f is not None for found in ReachableObjects(f).tensors]
        return [(place, t) for place, t in reached if t.requires_grad and id(t) not in known]

    def _checked_data(self, data: tuple[Tree, Tree]) -> Examples:
        examples = Examples(data)
        if examples.size != self.num_examples:
            refuse("Training(...)(data)", f"{self.num_examples} examples", examples.size)
        return examples

    def _checked_params(self, params: Params) -> Params:
        expected = {name: tuple(p.shape) for name, p in self.model.params().items()}
        got = {name: tuple(p.shape) for name, p in params.items()}
        if got != expected:
            refuse("Training(...)(params)", f"the trained parameters {expected}", got)
        return {name: params[name] for name in expected}

    def _checked_weights(self, weights: Tensor | None, like: Tensor) -> Tensor:
        if weights is None:
            return like.detach().new_ones(self.num_examples)
        check_type("Training(...)(weights)", weights, Tensor)
        has_size = weights.ndim > 0 and len(weights) == self.num_examples
        if not has_size or not weights.is_floating_point() or weights.device != like.device:
            refuse(
                "Training(...)(weights)",
                f"a floating point tensor [{self.num_examples}] or [{self.num_examples}, ...] on {like.device}",
                f"{weights.dtype} of shape {tuple(weights.shape)} on {weights.device}",
            )
        return weights


class Trained:
    """A trained model, as a differentiable function of the inputs of the training.

    Attributes:
        training: The training, a :class:`metagrad.Training`.
        trajectory: Stored states. Backward passes start from them.
        params: Trained parameters by name.
        buffers: Buffers by name, such as running statistics.
        losses: The loss of each step, ``[steps]``.
        optimizer_state: State of the functional optimizer, without a graph.
        weights: The weights of the examples.
        report: Stored states, bytes, and the number of steps that backward passes repeated.
    """

    def __init__(self, training: Training, trajectory: Trajectory) -> None:
        self.training = training
        self.trajectory = trajectory
        final = trajectory.final
        *tensors, self.losses = _Trained.apply(trajectory, *trajectory.leaves.flat())
        values = iter(tensors)
        self.params: Params = {name: next(values) for name in final.params}
        self.buffers: Params = {name: next(values) for name in final.buffers}
        self.optimizer_state = final.optimizer
        self.weights = trajectory.inputs.weights
        self.report: Report = trajectory.report

    def __repr__(self) -> str:
        return f"Trained by {self.training}, loss {self.losses[-1]:.4g} at the last step"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the trained model in evaluation mode."""
        return self.training.model.bound(self.params, self.buffers)(*args, **kwargs)

    def module(self) -> nn.Module:
        """Return a copy of the model with the trained parameters and buffers, in evaluation mode."""
        model = copy.deepcopy(self.training.model.module).eval()
        values = {**self.params, **self.buffers}
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name in values:
                    tensor.copy_(values[name])
        return model

    def jacobian(
        self, metrics: Metrics, wrt: str = "weights", *, chunk: int | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Differentiate several metrics of the trained model in one backward sweep through training.

        Args:
            metrics: ``metrics(trained)`` returns ``[k]``. The argument of ``metrics`` is a function that
                calls the trained model.
            wrt: ``"weights"``, ``"data"``, ``"params"`` (initial parameters), ``"rule"`` or ``"free"``.
                ``"rule"`` means the hyperparameters of the optimizer, and ``"free"`` means other tensors that
                the loss reads.
            chunk: Maximum number of metrics per sweep. Every further sweep repeats the training steps.

        Returns:
            The metrics ``[k]``, and their derivatives, ``[k, *shape]`` for each tensor. Zeros for integer tensors.

        Raises:
            ValueError: ``metrics`` does not return ``[k]``, or its result has no graph (an accuracy, for
                example). It reads the inputs of the training, or tensors of this object such as ``losses``.
        """
        check_choice("trained.jacobian(wrt)", wrt, Leaves._fields)
        values, rows = self._rows(metrics, wrt)
        leaves = self.trajectory.leaves
        wanted = leaves.only(wrt)
        count = check_count("trained.jacobian(chunk)", chunk, optional=True) or len(values)
        parts: list[list[Tensor]] = []
        for first in range(0, len(values), count):
            size = min(count, len(values) - first)
            found = self.trajectory.reverse(rows.sliced(first, first + size), None, wanted, size)
            parts.append(_dense(getattr(found, wrt), getattr(leaves, wrt), size))
        return values, [torch.cat(columns) for columns in zip(*parts, strict=True)]

    def _rows(self, metrics: Metrics, wrt: str) -> tuple[Tensor, StateCotangents]:
        """Return the metrics, and their derivatives with respect to the final state."""
        final = self.trajectory.final
        params = {name: variable(p) for name, p in final.params.items()}
        buffers = {name: variable(b) for name, b in final.buffers.items()}
        with torch.enable_grad():
            values = metrics(self.training.model.bound(params, buffers))
        check_type("trained.jacobian(metrics): the returned value", values, Tensor)
        if values.ndim != 1 or not len(values) or not values.requires_grad:
            refuse("trained.jacobian(metrics)", "[k] numbers that depend on the model, k > 0", values)
        others = [*getattr(self.trajectory.leaves, wrt), self.losses]
        ends = {get_gradient_edge(tensor).node for tensor in others if tensor.requires_grad}
        if not ends.isdisjoint(graph_nodes([values])):
            raise ValueError(
                "trained.jacobian(metrics): the metrics depend on inputs of the training, or on tensors of trained "
                "such as losses, besides the model that they receive. Call metrics(trained)[i].backward()."
            )
        inputs = [*params.values(), *buffers.values()]
        rows: Cotangents = vjp([values], inputs, [torch.eye(len(values)).to(values)], len(values))
        optimizer: Cotangents = [None] * len(dissect(final.optimizer)[0])
        return values.detach(), StateCotangents(rows[: len(params)], optimizer, rows[len(params) :])


def _dense(found: Cotangents, like: list[Tensor], count: int) -> list[Tensor]:
    """Replace None by zeros in cotangents."""
    return [x.new_zeros(count, *x.shape) if f is None else f for f, x in zip(found, like, strict=True)]


class _Trained(Function):
    """Final parameters, buffers and losses of a training run, as a function of its leaves."""

    @staticmethod
    def forward(trajectory: Trajectory, *leaves: Tensor) -> tuple[Tensor, ...]:
        final = trajectory.final
        tensors = (*final.params.values(), *final.buffers.values(), trajectory.losses)
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.trajectory = inputs[0]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in output if not is_differentiable(t)))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        trajectory = ctx.trajectory
        wanted = trajectory.leaves.filled(ctx.needs_input_grad[1:])
        if torch.is_grad_enabled():
            return None, *_differentiable(trajectory, wanted, cotangents)
        given = [c if c is None else c[None] for c in cotangents]
        size, final = len(trajectory.final.params), trajectory.final
        optimizer: Cotangents = [None] * len(dissect(final.optimizer)[0])
        after = StateCotangents(given[:size], optimizer, given[size:-1])
        found = trajectory.reverse(after, given[-1], wanted, 1)
        return None, *(f if f is None else f[0] for f in found.flat())


def _differentiable(
    trajectory: Trajectory, wanted: Leaves, cotangents: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """Return the cotangents of the leaves with a graph."""
    final, losses, views = trajectory.differentiable()
    outputs = [*final.params.values(), *final.buffers.values(), losses]
    own = [view for view, is_wanted in zip(views.flat(), wanted.flat(), strict=True) if is_wanted]
    found = iter(graph_vjp(outputs, own, cotangents, create_graph=True))
    return [next(found) if is_wanted else None for is_wanted in wanted.flat()]


def _checked_order(order: Tensor | None, size: int) -> Tensor | None:
    if order is None:
        return None
    check_type("Training(order)", order, Tensor)
    if order.ndim != 2 or order.dtype != torch.int64 or not len(order):
        refuse("Training(order)", "int64 [steps, batch]", f"{order.dtype} of shape {tuple(order.shape)}")
    if int(order.min()) < 0 or int(order.max()) >= size:
        refuse("Training(order)", f"indices from 0 to {size - 1}", (int(order.min()), int(order.max())))
    return order


def _number_of_steps(epochs: int | None, steps: int | None, per_epoch: int, order: Tensor | None) -> int:
    if order is not None:
        if epochs is not None or steps not in (None, len(order)):
            refuse("Training(order)", "order without epochs and steps", (epochs, steps))
        return len(order)
    if (epochs is None) == (steps is None):
        refuse("Training(epochs, steps)", "one of both", (epochs, steps))
    if steps is not None:
        return check_count("Training(steps)", steps)
    return check_count("Training(epochs)", epochs) * per_epoch
