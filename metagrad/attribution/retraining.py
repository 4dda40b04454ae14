"""Train many times with different example weights, as one training of stacked parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from metagrad.attribution.gradients import Metrics
from metagrad.core.budget import Bytes, checked_bytes
from metagrad.core.capture import RandomState
from metagrad.core.checks import check_type, progress, refuse, warn
from metagrad.core.tree import Params, dissect, plus, tree_map_only
from metagrad.distributed.exchange import refuse_differences, sums_over
from metagrad.optim.rule import with_batch_ndim
from metagrad.training import Training
from metagrad.training.step import Inputs, Part, State
from metagrad.training.stream import seed_step


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """Metrics of models that were trained with different example weights. :func:`retrain` returns them.

    Attributes:
        weights: Example weights of each model, ``[m, n]``.
        metrics: Metrics of each trained model, ``[m, k]``.
        params: Trained parameters, ``[m, ...]`` each, or None if they were not returned.
    """

    weights: Tensor
    metrics: Tensor
    params: Params | None = None


def retrain(
    training: Training, weights: Tensor, metrics: Metrics, *, chunk: Bytes = "256MiB", keep: bool = False
) -> Outcomes:
    """Train once for each row of weights, with the same order, initialization and random numbers.

    The models are trained together: the forward pass is vectorized over stacked parameters, and all rows
    share the mini-batches. A model that :func:`torch.func.vmap` does not support is trained once for each
    row, with a warning.

    Args:
        training: The training.
        weights: Weights of the examples, ``[m, n]``.
        metrics: ``metrics(model)`` calls a trained model and returns ``[k]``.
        chunk: Maximum bytes of the states of the models that are trained together.
        keep: True to return the trained parameters.

    Returns:
        The metrics of each training.

    Raises:
        ValueError: The weights are not a matrix with a column for each example. The ranks of the training's ``group``
            have different weights.

    Example:
        >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
        >>> training = metagrad.Training(
        ...     torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, (x, 2 * x),
        ...     optimizer=metagrad.optim.rules.sgd(lr=0.1), batch_size=8, steps=3
        ... )
        >>> metrics = lambda model: model(x[:2])[:, 0]
        >>> metagrad.attribution.retrain(training, torch.ones(3, 8), metrics).metrics.shape
        torch.Size([3, 2])
    """
    check_type("retrain(training)", training, Training)
    check_type("retrain(weights)", weights, Tensor)
    if weights.ndim != 2 or weights.shape[1] != training.num_examples or not len(weights):
        refuse("retrain(weights)", f"shape [m, {training.num_examples}], m > 0", tuple(weights.shape))
    weights = weights.to(next(iter(training.model.params().values())))
    refuse_differences(training.step.group, "retrain(weights)", [weights])
    size = checked_bytes("retrain(...)", "chunk", chunk)
    states: list[State] = []
    for rows in torch.split(weights, max(1, size // _state_bytes(training))):
        states += _trained(training, rows)
    with torch.no_grad():
        found = [metrics(training.model.bound(state.params, state.buffers)) for state in states]
    params = {name: torch.stack([state.params[name] for state in states]) for name in states[0].params}
    return Outcomes(weights, torch.stack(found), params if keep else None)


def _state_bytes(training: Training) -> int:
    params = training.model.params()
    with torch.no_grad():
        return sum(t.nbytes for t in dissect((params, training.optimizer.init(params), params))[0])


def _trained(training: Training, weights: Tensor) -> list[State]:
    """Return the final training state for each row of weights."""
    try:
        return _unstacked(_trained_together(training, weights), len(weights))
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
    states = [training(row).trajectory.final for row in weights.detach()]  # raises errors of the training
    warn(
        f"retrain(training): vmap does not support the model, so the trainings ran in turn. Reason: {reason}"
    )
    return states


def _trained_together(training: Training, weights: Tensor) -> State:
    """Return the final states, stacked."""
    count = len(weights)
    rule = with_batch_ndim(training.optimizer, 1)
    with torch.no_grad():
        params = {name: _stacked(p, count) for name, p in training.model.params().items()}
        buffers = {name: _stacked(b, count) for name, b in training.model.buffers().items()}
        state = State(params, rule.init(params), buffers)
    random = RandomState()
    with training.model.training():
        for t in progress(range(training.steps), "retraining"):
            grads, buffers = _gradient(training, state, weights, t)
            training.step.refuse_statistics(state, buffers)
            if t == 0:
                _compare(training, state, weights, grads)
                # matrix products choose the layout of gradients, other layouts are slow
                params = {name: torch.empty_like(g).copy_(state.params[name]) for name, g in grads.items()}
                state = State(params, rule.init(params), buffers)
            with torch.no_grad():
                params, optimizer = rule.update(grads, state.optimizer, state.params)
            state = State(params, optimizer, buffers)
    random.restore()
    return state


def _compare(training: Training, state: State, weights: Tensor, grads: Params) -> None:
    """Raise ``RuntimeError`` if a stacked model and a single one have different first gradients.

    Under vmap, dropout of a tensor that is not contiguous draws other numbers.
    """
    row = int(weights.abs().sum(1).argmax())
    inputs = Inputs(weights[row], training.examples, training.optimizer)
    alone = training.step.whole_gradient(_unstacked(state, len(weights))[row], 0, inputs).grads
    together = [grads[name][row] for name in alone]
    expected, found = (torch.cat([g.flatten() for g in own]) for own in (alone.values(), together))
    error = torch.finfo(expected.dtype).eps ** 0.5 * float(expected.abs().max())
    if not torch.allclose(found, expected, rtol=0.0, atol=error):
        raise RuntimeError("the stacked models draw other random numbers than a single model")


def _gradient(training: Training, state: State, weights: Tensor, t: int) -> tuple[Params, Params]:
    """Return the stacked gradients of step ``t``, and the stacked buffers after it."""
    step = training.step
    params = {name: p.detach().requires_grad_() for name, p in state.params.items()}
    buffers = state.buffers
    total: list[Any] = [None] * len(params)
    for part in step.parts(t):
        whole = weights[:, step.stream.rows(t)]
        seed_step(step.stream.seed, part.t, part.number)
        batch = training.examples.batch(part.rows)

        def loss(
            params: Params, buffers: Params, own: Tensor, whole: Tensor, batch: Any = batch, part: Part = part
        ) -> tuple[Tensor, Params]:
            buffers = {name: b.clone() for name, b in buffers.items()}
            with step.model.holding(params, buffers):
                return step.loss(own, step.divisor(whole), batch, part), step.model.held(buffers)

        stacked = torch.func.vmap(loss, randomness="same")
        with torch.enable_grad():
            losses, buffers = stacked(params, buffers, weights[:, part.rows], whole)
            found = torch.autograd.grad(
                losses.sum(), list(params.values()), allow_unused=True, materialize_grads=True
            )
        total = list(map(plus, total, found))
    if step.group is not None:
        total = [*sums_over(step.group, total, list(params.values()))]
    return dict(zip(params, total, strict=True)), {name: b.detach() for name, b in buffers.items()}


def _stacked(tensor: Tensor, count: int) -> Tensor:
    return tensor.detach().expand(count, *tensor.shape).clone()


def _unstacked(state: State, count: int) -> list[State]:
    return [tree_map_only(Tensor, lambda t, i=i: t[i] if t.ndim else t, state) for i in range(count)]
