"""The loop over tasks of tutorials, which is the oracle of all algorithms."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import metagrad as mg
from metagrad.tasks import Batch, Examples


def textbook(
    model, loss_fn, batch, *, lr, steps, order=2, names=None, start=None, truncate=None, weights=None
):
    """Return the loss of each task, by a plain loop as in tutorials.

    The parameters in ``names`` are adapted, or all parameters. They start from the values of ``start(model, x, y)``.
    ``lr`` is a float, or a tensor with one rate for each step. A function ``lr(t, name, gradient)`` returns the
    move of a parameter. Steps before the last ``truncate`` are constants.
    ``weights`` are the weights of the query losses after each step.
    """

    def move(t, name, gradient):
        if callable(lr):
            return lr(t, name, gradient)
        return (lr[t] if isinstance(lr, torch.Tensor) and lr.ndim else lr) * gradient

    losses = []
    for x, y, query_x, query_y in zip(*batch.support, *batch.query, strict=True):
        fast = {
            k: p for k, p in model.named_parameters() if p.requires_grad and (names is None or k in names)
        }
        if start is not None:
            # Separate variables, so that inner gradients stop at the initial values.
            fast = {k: p.clone().requires_grad_() for k, p in {**fast, **start(model, x, y)}.items()}
        total = 0.0
        for t in range(steps):
            is_kept = truncate is None or t >= steps - truncate
            loss = loss_fn(functional_call(model, fast, (x,)), y)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=order == 2 and is_kept)
            moves = [move(t, name, g) for name, g in zip(fast, grads, strict=True)]
            moves = moves if is_kept else [m.detach() for m in moves]
            fast = {k: p - m for (k, p), m in zip(fast.items(), moves, strict=True)}
            if weights is not None:
                total = total + weights[t] * loss_fn(functional_call(model, fast, (query_x,)), query_y)
        losses.append(
            loss_fn(functional_call(model, fast, (query_x,)), query_y) if weights is None else total
        )
    return torch.stack(losses)


def net(features=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, features), nn.Tanh(), nn.Linear(features, 3)).double()


def normed_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()


class Adapting(nn.Module):
    """Calls ``adapt`` of an algorithm, which may have substituted parameters."""

    def __init__(self, algorithm):
        super().__init__()
        self.algorithm = algorithm

    def forward(self, support):
        return self.algorithm.adapt(support)


class Graph(nn.Module):
    """A graph network layer, whose input has all nodes of the graph."""

    def __init__(self, nodes, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.register_buffer("adjacency", torch.rand(nodes, nodes))

    def forward(self, x):
        return self.adjacency @ self.linear(x)


class Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self, scale=1.5):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale, dtype=torch.float64))

    def forward(self, prediction, target):
        return F.mse_loss(prediction * self.scale, target)


def learner(algorithm, model, loss_fn=F.mse_loss, **options):
    """Return an algorithm that takes two inner steps of gradient descent, where the options say nothing else."""
    return algorithm(model, loss_fn, **{"inner": mg.optim.rules.sgd(lr=0.1), "steps": 2, **options})


def some_tasks(batch, index):
    """Return the tasks of a batch at an index."""
    return Batch(*(Examples(part.x[index], part.y[index]) for part in batch))


def gradients(loss, variables, **options):
    return torch.autograd.grad(loss, list(variables), materialize_grads=True, **options)


def assert_close(found, expected, rtol=1e-9, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def assert_learns_as(out, losses, variables):
    """Compare an output with the query losses of a loop over tasks. Return the gradients of its loss."""
    variables = list(variables)
    assert_close(out.query_losses, losses)
    found = gradients(out.loss, variables)
    assert_close(found, gradients(losses.mean(), variables))
    return found
