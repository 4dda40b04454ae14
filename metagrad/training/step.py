"""One training step as a pure function: the gradient of a mini-batch, then the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from metagrad.core._torch import BatchNorm, InstanceNorm
from metagrad.core.modules import called_on
from metagrad.core.norms import composite_norms, unfused_attention
from metagrad.core.reach import Place, placed
from metagrad.core.substitution import Read, copied, noted_reads, refuse_hidden, tensor_places
from metagrad.core.tree import LossFn, Params, Tree, is_differentiable, with_fresh_views, zeros_for_none
from metagrad.distributed.exchange import sums_over
from metagrad.optim.rule import Rule
from metagrad.training.losses import example_losses
from metagrad.training.stream import Examples, Stream, seed_step


class State(NamedTuple):
    """The state of a training, which every step changes.

    Attributes:
        params: Parameters by name.
        optimizer: State of the functional optimizer.
        buffers: Buffers of the model by name, such as running statistics.
    """

    params: Params
    optimizer: Any
    buffers: Params


class Inputs(NamedTuple):
    """The inputs of a training, in addition to the initial parameters.

    Attributes:
        weights: Weights of the examples, ``[n]``, or of their terms, such as tokens, ``[n, ...]``.
        examples: The examples.
        rule: The functional optimizer.
        places: Other tensors that require grad and are read by the loss, model or transform, with their
            places.
    """

    weights: Tensor
    examples: Examples
    rule: Rule
    places: Sequence[tuple[Place, Tensor]] = ()


class Part(NamedTuple):
    """A part of a mini-batch: all of it, a micro-batch, or the examples of a rank.

    Attributes:
        t: Number of the step.
        number: Number of the part, which seeds its random numbers. The numbers of rank r begin at r 2^32.
        rows: Indices of its examples.
    """

    t: int
    number: int
    rows: Tensor


class Gradient(NamedTuple):
    """The gradient of a part of the loss.

    Attributes:
        grads: The gradient by parameter name.
        loss: The part of the loss, a 0-d tensor.
        buffers: The buffers after the forward pass.
    """

    grads: Params
    loss: Tensor
    buffers: Params

    def detached(self) -> Gradient:
        """Return the same values without a graph."""
        grads, buffers = ({name: t.detach() for name, t in own.items()} for own in (self.grads, self.buffers))
        return Gradient(grads, self.loss.detach(), buffers)


def variable(tensor: Tensor) -> Tensor:
    """Return a leaf that requires grad, or an integer tensor unchanged."""
    return tensor.detach().requires_grad_(is_differentiable(tensor))


class Model:
    """A model as a function of its parameters and buffers. Each module keeps its training mode.

    Args:
        model: A module in training mode. Its parameters that require grad are trained. It is never modified.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self.places = [(place, names[id(t)]) for place, t in tensor_places(model)]
        self.modes = [(module, module.training) for module in model.modules()]
        self.has_statistics = any(
            isinstance(module, (BatchNorm, InstanceNorm)) and module.track_running_stats
            for module, _ in self.modes
        )

    def params(self) -> Params:
        """Return the trained parameters of the model with their current values."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def buffers(self) -> Params:
        """Return copies of the current buffers of the model."""
        return {name: b.detach().clone() for name, b in self.module.named_buffers()}

    @contextlib.contextmanager
    def training(self) -> Generator[None]:
        """Context manager in which each module has the mode that it had at construction."""
        with _modes(self.modes), self.differentiable():
            yield

    @contextlib.contextmanager
    def evaluation(self) -> Generator[None]:
        """Context manager in which the modules are in evaluation mode."""
        with _modes([(module, False) for module, _ in self.modes]):
            yield

    @contextlib.contextmanager
    def differentiable(self) -> Generator[None]:
        """Context manager and decorator in which attention and running statistics are differentiable."""
        norms = composite_norms() if self.has_statistics else contextlib.nullcontext()
        with unfused_attention(), norms:
            yield

    @contextlib.contextmanager
    def holding(self, params: Params, buffers: Params) -> Generator[None]:
        """Context manager that puts parameters and buffers into the model. Tied weights stay tied."""
        values = {**params, **buffers}
        with placed((place, values[name]) for place, name in self.places if name in values):
            yield

    def held(self, names: Iterable[str]) -> Params:
        """Return the buffers that the model holds now. A forward pass may have replaced them."""
        held = {name: place.get() for place, name in self.places}
        return {name: held[name] for name in names}

    def bound(self, params: Params, buffers: Params) -> BoundModel:
        """Return the model in evaluation mode with these parameters and buffers."""
        return BoundModel(self, params, buffers)

    def __call__(self, x: Tree) -> Tree:
        """Call the model on one argument, or on a mapping or sequence of arguments."""
        return called_on(self.module, x)


class BoundModel(NamedTuple):
    """A model in evaluation mode, with its parameters and buffers.

    Attributes:
        model: The model.
        params: Parameters by name.
        buffers: Buffers by name.
    """

    model: Model
    params: Params
    buffers: Params

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. The call does not change the buffers."""
        buffers = {name: b.clone() for name, b in self.buffers.items()}
        model = self.model
        with (
            model.evaluation(),
            model.holding(self.params, buffers),
            model.differentiable(),
            copied(model.module, model.differentiable()) as own,
        ):  # checkpointed layers can run again in a backward pass
            return own(*args, **kwargs)


@contextlib.contextmanager
def _modes(modes: Sequence[tuple[nn.Module, bool]]) -> Generator[None]:
    before = [(module, module.training) for module, _ in modes]
    try:
        for module, training in modes:
            module.training = training
        yield
    finally:
        for module, training in before:
            module.training = training


class Step:
    """A training step, as a function of the state and the inputs of the training.

    Args:
        model: The model.
        loss_fn: Returns the losses of the examples, or their mean.
        stream: The examples of each step.
        average: ``"batch"`` or ``"weights"``. See :class:`metagrad.Training`.
        micro_batch: Maximum number of examples of a part, or None.
        transform: Function of a batch ``(x, y)``, or None.
        group: Process group whose ranks share each mini-batch, or None.
    """

    def __init__(
        self,
        model: Model,
        loss_fn: LossFn,
        stream: Stream,
        average: str,
        micro_batch: int | None,
        transform: Callable[[Tree, Tree], tuple[Tree, Tree]] | None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.stream = stream
        self.average = average
        self.micro_batch = micro_batch
        self.transform = transform
        self.group = None if group is None or group.size() == 1 else group

    def parts(self, t: int) -> list[Part]:
        """Return the parts of the mini-batch of step ``t`` that this rank computes."""
        rows = self.stream.rows(t)
        rank, size = (0, 1) if self.group is None else (self.group.rank(), self.group.size())
        own = rows.tensor_split(size)[rank].split(self.micro_batch or len(rows))
        return [Part(t, (rank << 32) + i, r) for i, r in enumerate(own) if len(r)]

    def total(self, state: State, gradients: Sequence[Gradient]) -> Gradient:
        """Return the gradient of a step, from the gradients of the parts of this rank."""
        if gradients:
            self.refuse_statistics(state, gradients[-1].buffers)
        if self.group is None:
            return summed(gradients)
        zeros = {name: torch.zeros_like(p) for name, p in state.params.items()}
        zero = next(iter(zeros.values())).new_zeros(())
        own = summed([Gradient(zeros, zero, state.buffers), *gradients])
        found = [*own.grads.values(), own.loss.to(zero)]
        *grads, loss = sums_over(self.group, found, found)
        return Gradient(dict(zip(zeros, grads, strict=True)), loss.to(own.loss), own.buffers)

    def divisor(self, weights: Tensor) -> Tensor:
        """Return the divisor of the weighted sum of the losses of a mini-batch, in float32 or wider."""
        dtype = torch.promote_types(weights.dtype, torch.float32)
        if self.average == "batch":
            return weights.new_tensor(float(weights.numel()), dtype=dtype)
        total = weights.sum(dtype=dtype)
        return total.where(total != 0, 1)

    def loss(self, weights: Tensor, divisor: Tensor, batch: tuple[Tree, Tree], part: Part) -> Tensor:
        """Return a part of the loss, at the parameters that the model holds."""
        x, y = batch if self.transform is None else self.transform(*batch)
        output, count = self.model(x), len(part.rows)
        is_whole = count == len(self.stream.rows(part.t))
        losses = example_losses(self.loss_fn, output, y, count, whole=is_whole)
        if weights.ndim == 1:
            losses = losses.flatten(1).mean(1) if losses.ndim > 1 else losses
        elif losses.shape != weights.shape:
            raise ValueError(
                f"Training(...)(weights): the weights of the mini-batch have shape {tuple(weights.shape)}, so the "
                f"losses must have this shape, got {tuple(losses.shape)}."
            )
        return (weights * losses).sum(dtype=divisor.dtype) / divisor

    def gradient(
        self,
        params: Params,
        buffers: Params,
        weights: Tensor,
        divisor: Tensor,
        batch: tuple[Tree, Tree],
        part: Part,
        *,
        create_graph: bool = False,
    ) -> Gradient:
        """Return the gradient of a part of the loss. The model holds the parameters and the buffers."""
        reads: list[Read] = []
        is_first = part.t == part.number == 0
        with torch.enable_grad():
            with noted_reads(self.model.module, reads) if is_first else contextlib.nullcontext():
                loss = self.loss(weights, divisor, batch, part)
            if not loss.requires_grad:
                raise ValueError("Training(model, loss_fn): the loss does not depend on the parameters.")
            found = torch.autograd.grad(
                loss, list(params.values()), create_graph=create_graph, allow_unused=True
            )
        unused = {id(p) for p, gradient in zip(params.values(), found, strict=True) if gradient is None}
        refuse_hidden("Training(model)", reads, unused)
        for name, gradient in zip(params, found, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise ValueError(
                    f"Training(model): the gradient of {name!r} is sparse, which a training does not support. Use "
                    "sparse=False in nn.Embedding, and a table of only the rows that the data use (torch.unique)."
                )
        grads = dict(zip(params, zeros_for_none(found, params.values()), strict=True))
        return Gradient(grads, loss if create_graph else loss.detach(), self.model.held(buffers))

    def take(
        self, state: State, t: int, inputs: Inputs, gradients: Sequence[Gradient] | None = None
    ) -> tuple[State, Tensor]:
        """Return the state after step ``t`` and the loss, without a graph.

        Args:
            state: The state before the step.
            t: Number of the step.
            inputs: The inputs of the training.
            gradients: The gradient of each part, or None to compute them.
        """
        own = None if gradients is None else [gradient.detached() for gradient in gradients]
        total = self.whole_gradient(state, t, inputs) if own is None else self.total(state, own)
        with torch.no_grad():
            params, optimizer = inputs.rule.update(total.grads, state.optimizer, state.params)
        return State(params, optimizer, total.buffers), total.loss

    def take_with_graph(self, state: State, t: int, inputs: Inputs) -> tuple[State, Tensor]:
        """Return the state after step ``t`` and the loss, differentiable any number of times."""
        total = self.whole_gradient(state, t, inputs, create_graph=True)
        params, optimizer = inputs.rule.update(total.grads, state.optimizer, state.params)
        return State(with_fresh_views(params, state.params), optimizer, total.buffers), total.loss

    def whole_gradient(self, state: State, t: int, inputs: Inputs, *, create_graph: bool = False) -> Gradient:
        """Return the gradient of step ``t``."""
        params = state.params if create_graph else {name: variable(p) for name, p in state.params.items()}
        buffers = {name: b.clone() for name, b in state.buffers.items()}
        total: list[Gradient] = []  # one sum, or nothing if this rank has no part
        for part in self.parts(t):
            with torch.set_grad_enabled(create_graph):
                weights, divisor, batch = self.examples(part, inputs)
            with self.model.holding(params, buffers):
                own = self.gradient(params, buffers, weights, divisor, batch, part, create_graph=create_graph)
            total = [summed([*total, own])]
            buffers = own.buffers
        return self.total(state, total)

    def examples(self, part: Part, inputs: Inputs) -> tuple[Tensor, Tensor, tuple[Tree, Tree]]:
        """Seed the random numbers of a part. Return its example weights, the divisor of its loss, and its batch."""
        seed_step(self.stream.seed, part.t, part.number)
        whole = inputs.weights[self.stream.rows(part.t)]
        return inputs.weights[part.rows], self.divisor(whole), inputs.examples.batch(part.rows)

    def refuse_statistics(self, state: State, after: Params) -> None:
        """Raise ``ValueError`` if parts of a mini-batch changed a buffer."""
        is_split = self.micro_batch is not None or self.group is not None
        for name, before in state.buffers.items() if is_split else ():
            if (self.group is not None or is_differentiable(before)) and not torch.equal(before, after[name]):
                raise ValueError(
                    f"Training(micro_batch, group): the model writes its buffer {name!r}, so parts of a mini-batch "
                    "depend on each other. Use GroupNorm or LayerNorm, or leave both arguments out."
                )


def summed(gradients: Sequence[Gradient]) -> Gradient:
    """Return the sum of the gradients of the parts of a mini-batch, in order."""
    total = gradients[0]
    for other in gradients[1:]:
        grads = {name: g + other.grads[name] for name, g in total.grads.items()}
        total = Gradient(grads, total.loss + other.loss, other.buffers)
    return total
