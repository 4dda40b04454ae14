"""AdaHessian and Sophia, which estimate the diagonal of a curvature matrix and divide by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from metagrad.autograd.checks.finite import is_finite
from metagrad.autograd.derivatives.graph_vjp import graph_vjp
from metagrad.core.capture import entropy
from metagrad.core.checks import warn
from metagrad.core.tree import widened
from metagrad.curvature.estimators.probes import Distribution, Generators, fill
from metagrad.optim.second_order.curvature_optimizer import (
    BackwardPass,
    CurvatureOptimizer,
    label_gradients,
    options_of,
)
from metagrad.optim.torch_optim.optimizer import Group, ParameterGroups, ParamsWithGrad, as_number
from metagrad.optim.torch_optim.sparse_gradients import as_rows
from metagrad.optim.torch_optim.state import PendingUpdate
from metagrad.sparse.tables.row_sparse import RowSparse


class DiagonalOptimizer(CurvatureOptimizer):
    """An optimizer that estimates the diagonal of a curvature matrix and divides by it.

    The estimate is computed during ``backward``. With gradient accumulation, only the graph of the current
    micro-batch is in memory. All micro-batches of a step use the same probes, so their estimates sum to the estimate
    of the batch.
    """

    counts = ("samples",)
    distribution: ClassVar[Distribution] = "rademacher"
    """The distribution of the probes."""
    _estimates: dict[Tensor, Tensor] | None = None
    """Estimates since the last step. None before a backward pass."""

    def _diagonal(
        self, samples: int, params: Sequence[Tensor], graph: BackwardPass, generators: Generators
    ) -> list[Tensor]:
        r"""Estimate the diagonal of the Hessian by Hutchinson's probes, :math:`z \odot H z` with E[z z^T] = I.

        Args:
            samples: Number of probes, over which the estimate is averaged.
            params: The parameters.
            graph: The backward pass, with the graphs of its gradients.
            generators: Draw the probes.

        References:
            Bekas, Kokiopoulou, Saad, "An estimator for the diagonal of a matrix", Applied Numerical Mathematics 57,
            2007.
        """
        grads = [graph.grads[p] for p in params]
        totals = [torch.zeros_like(widened(p)) for p in params]
        for index in range(samples):
            probes = [fill(g.new_empty(g.shape), self.distribution, generators[g.device]) for g in grads]
            keep = graph.retain_graph or index + 1 < samples
            found = graph_vjp(grads, params, probes, retain_graph=keep)
            for total, z, product in zip(totals, probes, found, strict=True):
                if product is not None:
                    total += widened(z) * widened(product) / samples
        return totals

    def _moved(
        self, group: Group, p: Tensor, g: Tensor, diagonal: Tensor | None, state: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the new value and state of a parameter. ``diagonal`` is None in steps without an estimate."""
        raise NotImplementedError

    def _check_group(self, index: int) -> None:
        super()._check_group(index)
        first, group = self.param_groups[0], self.param_groups[index]
        if group["samples"] != first["samples"]:
            raise ValueError(
                f"{type(self).__name__}(params): one estimate is of all groups, so samples must be the same in all, "
                f"got {first['samples']} and {group['samples']}."
            )

    def _observe(self, graph: BackwardPass) -> None:
        due = [p for group in self.param_groups if self._is_due(group) for p in group["params"]]
        params, estimates = [p for p in due if p in graph.grads], dict(self._estimates or {})
        for index in range(len(self.param_groups)):
            for key, p in self._named(index).items():
                if isinstance(as_rows(graph.grads.get(p, p)), RowSparse):
                    raise self._without_rows(key)
        first = self.param_groups[0]
        generators = Generators(entropy(first["seed"], first["step"]))
        found = self._diagonal(first["samples"], params, graph, generators) if params else []
        for p, estimate in zip(params, found, strict=True):
            goes_on = p in estimates and p.grad is not None  # otherwise its gradient was dropped
            estimates[p] = estimates[p] + estimate if goes_on else estimate
        self._estimates = estimates

    def _forget(self) -> None:
        super()._forget()
        self._estimates = None

    def _observed(self, work: ParamsWithGrad) -> Iterator[tuple[str, Tensor]]:
        yield from super()._observed(work)
        for key, p in work.params.items():
            if self._estimates and p in self._estimates:
                yield f"the curvature of {key!r}", self._estimates[p]

    def _unscaled(self) -> bool:
        if not super()._unscaled():
            return False
        if self._estimates:
            scale = self._inverse_scale()
            self._estimates = {p: estimate * scale for p, estimate in self._estimates.items()}
            if not is_finite(list(self._estimates.values())):
                warn(
                    f"{type(self).__name__}.step: under the scale of GradScaler the curvature has overflowed, though "
                    "the gradients have not, and the step is skipped. A smaller init_scale leaves room for products "
                    "with the Hessian."
                )
                return False
        return True

    def _updates(self, work: ParamsWithGrad) -> Iterator[PendingUpdate]:
        group, params, grads = work
        self._rule(group)
        is_due, sign = self._is_due(group), -1 if group["maximize"] else 1
        if is_due and self._estimates is None:
            raise self._without_curvature()
        for key, p in params.items():
            w, g = widened(p), sign * widened(grads[key])
            diagonal = None
            if is_due:  # a parameter that no loss depended on has no curvature, as it has no gradient
                diagonal = sign * (self._estimates or {}).get(p, torch.zeros_like(w))
            state = self.state.get(p, {})
            new, slots = self._moved(group, w, g, diagonal, state)
            yield PendingUpdate({key: p}, {key: new}, {key: {"step": state.get("step", 0) + 1, **slots}})


class AdaHessian(DiagonalOptimizer):
    r"""Optimize by AdaHessian: Adam with the squared diagonal of the Hessian as second moment.

    .. math::
        D_t &= \frac{1}{S} \sum_{s=1}^{S} z_s \odot H_t z_s, \qquad z_s \in \{-1, 1\}^n \\
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) \bar D_t^2 \\
        w_t &= (1 - \eta \lambda) w_{t-1}
               - \eta \, \frac{m_t / (1 - \beta_1^t)}{\bigl(v_t / (1 - \beta_2^t)\bigr)^{k / 2} + \epsilon}

    where :math:`\bar D` is :math:`D`, averaged over the positions of each convolution kernel. Use a closure of the
    usual form, or ``opt.backward(loss)`` instead of ``loss.backward()``. Both work with a ``GradScaler``. Limits are
    listed in :class:`~metagrad.optim.second_order.curvature_optimizer.CurvatureOptimizer`. Sparse gradients raise an
    error. A step costs two to four gradients.

    Args:
        params: Parameters, with or without names, or groups of parameters with their own hyperparameters.
        lr: The learning rate :math:`\eta`. The learning rate multiplies a Newton step, so it is larger than
            for Adam.
        betas: Decay rates of the averages of gradients and of squared diagonals, each from 0 to below 1.
        eps: Added to the diagonal. It bounds the step where there is no curvature.
        weight_decay: Decoupled weight decay :math:`\lambda`: each step subtracts :math:`\eta \lambda w`.
        hessian_power: The power :math:`k` of the diagonal: 1 is Newton's step, 0 is momentum without curvature.
        samples: Probes for each step, :math:`S`. Each probe costs a Hessian-vector product.
        spatial_average: Average the diagonal over the dimensions after the first two, which are the positions in the
            kernel of a convolution. As in the paper, values are averaged. The paper's code averages absolute
            values.
        maximize: Maximize the loss instead of minimizing it. Weights decay as before.
        nonfinite: Reaction if the loss, a gradient or the curvature is NaN or infinite. ``"raise"`` raises an
            error. ``"skip"`` leaves the step out and counts it in ``opt.stats``. Parameters and state do not change.
        seed: Seed of the random numbers, which also depend on the number of the step. None means
            ``torch.initial_seed()``.

    Raises:
        ValueError: A hyperparameter is out of its range.
        TypeError: A parameter is complex, or a hyperparameter is not a number.

    Example:
        With a diagonal Hessian the first step is Newton's, to the minimum:

        >>> from metagrad.optim import AdaHessian
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> opt = AdaHessian([w], lr=1.0, eps=0.0)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = (torch.tensor([1.0, 100.0]) * (w - 3) ** 2).sum()
        ...     loss.backward()
        ...     return loss
        >>> opt.step(closure), w
        (tensor(104.), tensor([3., 3.], requires_grad=True))

    References:
        Yao, Gholami, Shen, Mustafa, Keutzer, Mahoney, "ADAHESSIAN: an adaptive second order optimizer for machine
        learning", AAAI 2021, algorithm 1 and equations 8 to 12.
    """

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 0.15,
        *,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-4,
        weight_decay: float | Tensor = 0.0,
        hessian_power: float | Tensor = 1.0,
        samples: int = 1,
        spatial_average: bool = True,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
        seed: int | None = None,
    ) -> None:
        self._initialize(params, options_of(locals()))

    def _moved(
        self, group: Group, p: Tensor, g: Tensor, diagonal: Tensor | None, state: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        lr, eps, decay, power = map(
            as_number, (group[n] for n in ("lr", "eps", "weight_decay", "hessian_power"))
        )
        beta1, beta2 = as_number(group["betas"])
        assert diagonal is not None
        if group["spatial_average"] and p.ndim > 2:
            diagonal = diagonal.mean(tuple(range(2, p.ndim)), keepdim=True)
        mean, square = (state[n] if n in state else torch.zeros_like(p) for n in ("mean", "square"))
        mean = beta1 * mean + (1 - beta1) * g
        square = beta2 * square + (1 - beta2) * diagonal.square()
        steps = state.get("step", 0) + 1
        # Both bias corrections are one factor of the step, which saves a pass over the parameter.
        correction = (1 - beta2**steps) ** (power / 2)
        scale = square ** (power / 2) + eps * correction
        move = lr * correction / (1 - beta1**steps) * mean / scale
        return (1 - lr * decay) * p - move, {"mean": mean, "square": square}


class SophiaH(DiagonalOptimizer):
    r"""Optimize by Sophia-H: a momentum divided by the Hessian's diagonal, clipped element by element.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        h_t &= \beta_2 h_{t-k} + (1 - \beta_2) \, u \odot (H_t u), \quad u \sim \mathcal{N}(0, I),
               \qquad \text{every } k \text{ steps, else } h_t = h_{t-1} \\
        w_t &= (1 - \eta \lambda) w_{t-1}
               - \eta \, \operatorname{clip}\bigl(m_t / \max(\gamma h_t, \epsilon), 1\bigr)

    If curvature is small or negative, the step is ``lr`` times the sign of the momentum. If the curvature is large,
    the step is a multiple of Newton's step. Use a closure of the usual form, or ``opt.backward(loss)`` instead of
    ``loss.backward()``. Both work with a ``GradScaler``. Limits are listed in
    :class:`~metagrad.optim.second_order.curvature_optimizer.CurvatureOptimizer`. Sparse gradients raise an error.
    Steps between two estimates cost one gradient.

    Args:
        params: Parameters, with or without names, or groups of parameters with their own hyperparameters.
        lr: The learning rate :math:`\eta`. Apart from weight decay, no element changes by more than ``lr`` in
            a step. The paper uses 0.8 times the learning rate of Adam for language models of 125 million
            parameters and more, 2e-4 to 6e-4. The default is for small models and fewer steps.
        betas: Decay rates of the averages of gradients and of diagonals, each from 0 to below 1.
        gamma: The factor of the diagonal, which decides how many elements are clipped.
        eps: Smallest divisor of a momentum, above 0.
        weight_decay: Decoupled weight decay :math:`\lambda`: each step subtracts :math:`\eta \lambda w`. The
            paper uses 0.2.
        curvature_every: Steps from one estimate to the next, :math:`k`. The first step makes an estimate.
        samples: Probes for each estimate.
        maximize: Maximize the loss: negate gradient and curvature. Weights decay as before.
        nonfinite: Reaction if the loss, a gradient or the curvature is NaN or infinite. ``"raise"`` raises an
            error. ``"skip"`` leaves the step out and counts it in ``opt.stats``. Parameters and state do not change.
        seed: Seed of the random numbers, which also depend on the number of the step. None means
            ``torch.initial_seed()``.

    Raises:
        ValueError: A hyperparameter is out of its range.
        TypeError: A parameter is complex, or a hyperparameter is not a number.

    Example:
        >>> from metagrad.optim import SophiaH
        >>> w = torch.tensor([1.0, -2.0], requires_grad=True)
        >>> opt = SophiaH([w], lr=0.5)
        >>> opt.backward((w**2).sum())
        >>> opt.step()
        >>> w
        tensor([ 0.5000, -1.5000], requires_grad=True)

    References:
        Liu, Li, Hall, Liang, Ma, "Sophia: a scalable stochastic second-order optimizer for language model
        pre-training", ICLR 2024, algorithms 1 and 3.
    """

    counts = ("samples", "curvature_every")
    distribution = "normal"

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 4e-3,
        *,
        betas: tuple[float | Tensor, float | Tensor] = (0.96, 0.99),
        gamma: float | Tensor = 0.01,
        eps: float | Tensor = 1e-12,
        weight_decay: float | Tensor = 0.0,
        curvature_every: int = 10,
        samples: int = 1,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
        seed: int | None = None,
    ) -> None:
        self._initialize(params, options_of(locals()))

    def _moved(
        self, group: Group, p: Tensor, g: Tensor, diagonal: Tensor | None, state: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        lr, gamma, eps, decay = map(as_number, (group[n] for n in ("lr", "gamma", "eps", "weight_decay")))
        beta1, beta2 = as_number(group["betas"])
        mean, hessian = (state[n] if n in state else torch.zeros_like(p) for n in ("mean", "hessian"))
        mean = beta1 * mean + (1 - beta1) * g
        if diagonal is not None:
            hessian = beta2 * hessian + (1 - beta2) * diagonal
        direction = (mean / torch.clamp(gamma * hessian, min=eps)).clamp(-1, 1)
        return (1 - lr * decay) * p - lr * direction, {"mean": mean, "hessian": hessian}


class SophiaG(SophiaH):
    r"""Optimize by Sophia-G: Sophia with the diagonal of the Gauss-Newton matrix, from labels drawn from the model.

    .. math:: h_t = \beta_2 h_{t-k} + (1 - \beta_2) \, B \, \hat g_t^2, \qquad
              \hat g_t = \frac{1}{B} \sum_{n=1}^{B} \nabla \ell_n(\hat y_n), \qquad \hat y_n \sim p(\cdot | x_n)

    and otherwise the equations of :class:`SophiaH`. The estimate is never negative, and costs one additional
    backward pass. The loss has to be computed inside the closure, or within ``with opt.recording():``. There,
    calls of ``F.cross_entropy``, ``F.mse_loss``, ``F.nll_loss``, ``F.gaussian_nll_loss``,
    ``F.binary_cross_entropy`` and ``F.binary_cross_entropy_with_logits`` (also by their modules) are
    recorded, with their weights in the total loss. Other parts of the loss, such as a penalty on the weights,
    do not enter the estimate.

    Args:
        params: Parameters, with or without names, or groups of parameters with their own hyperparameters.
        lr: The learning rate, as in :class:`SophiaH`.
        gamma: The factor of the diagonal, which decides how many elements are clipped.
        samples: Number of label samples for each estimate.
        **more: The other arguments of :class:`SophiaH`.

    Raises:
        ValueError: A hyperparameter is out of its range, or (in ``backward``) the loss contains no loss of known
            form.
        TypeError: A parameter is complex, or a hyperparameter is not a number.

    Example:
        >>> from metagrad.optim import SophiaG
        >>> model = torch.nn.Linear(4, 3)
        >>> opt = SophiaG(model.parameters(), lr=0.1)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = torch.nn.functional.cross_entropy(model(torch.eye(4)), torch.tensor([0, 1, 2, 0]))
        ...     loss.backward()
        ...     return loss
        >>> losses = [float(opt.step(closure)) for _ in range(20)]
        >>> losses[-1] < losses[0] / 2
        True

    References:
        Liu, Li, Hall, Liang, Ma, "Sophia: a scalable stochastic second-order optimizer for language model
        pre-training", ICLR 2024, algorithms 2 and 3.
    """

    notes_losses = True
    differentiates_twice = False

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 4e-3,
        *,
        gamma: float | Tensor = 0.05,
        samples: int = 1,
        **more: Any,
    ) -> None:
        super().__init__(params, lr, gamma=gamma, samples=samples, **more)

    def _diagonal(
        self, samples: int, params: Sequence[Tensor], graph: BackwardPass, generators: Generators
    ) -> list[Tensor]:
        r"""Estimate the diagonal of the Gauss-Newton matrix by squared gradients for labels drawn from the model.

        Args:
            samples: Number of samples, over which the estimate is averaged.
            params: The parameters.
            graph: The backward pass, with its losses of known form.
            generators: Draw the labels.

        References:
            Liu et al., "Sophia", ICLR 2024, section 2.3; the identity is Bartlett's.
        """
        totals = [torch.zeros_like(widened(p)) for p in params]
        gradients = label_gradients(
            graph.losses, params, generators, samples, retain_graph=graph.retain_graph
        )
        for sign, found in gradients:
            for total, g in zip(totals, found, strict=True):
                if g is not None:  # in float32: in float16 the squares of small numbers are zero
                    total += sign * widened(g).square() / samples
        return totals
