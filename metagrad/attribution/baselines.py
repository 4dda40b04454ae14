"""Cheaper scores, which do not differentiate through the training."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from metagrad.attribution.gradients import Metrics, example_gradients, metric_gradients
from metagrad.core._torch import linalg
from metagrad.core.checks import check_count, refuse
from metagrad.core.tree import Params, Tree
from metagrad.curvature import influence, kfac
from metagrad.optim.hyperparameters import at_step
from metagrad.training import Trained


@dataclasses.dataclass(frozen=True)
class TracIn:
    r"""Dot product of metric gradients and example gradients, summed over checkpoints of the training.

    .. math:: -\sum_c \frac{T \eta_c}{C n} \langle \nabla m_j(\theta_c), \nabla \ell_i(\theta_c) \rangle

    The checkpoints are evenly spaced, and the last checkpoint is the trained model. :math:`\eta_c` is the
    learning rate at checkpoint c, or 1 if the functional optimizer has no numeric learning rate. Class
    weights multiply :math:`\ell_i`. It is a method of :func:`~metagrad.attribution.attribute`.

    Attributes:
        checkpoints: Number of checkpoints, C. With 1, only the gradients of the trained model are used.

    References:
        Pruthi et al., "Estimating training data influence by tracing gradient descent", NeurIPS 2020, section 3.2.
    """

    checkpoints: int = 10

    def scores(self, trained: Trained, metrics: Metrics) -> Tensor:
        """Return the scores, ``[k, n]``."""
        trajectory = trained.trajectory
        count = min(check_count("TracIn(checkpoints)", self.checkpoints), trajectory.steps)
        wanted = {round(trajectory.steps * (c + 1) / count) for c in range(count)}
        scale = trajectory.steps / (len(wanted) * trained.training.num_examples)
        found = list[Tensor]()
        for t, state in trajectory.states():
            if t in wanted:
                own = metric_gradients(trained, state, metrics)
                products = [own @ gradients.T for _, gradients in example_gradients(trained, state)]
                found.append(-scale * _rate(trajectory.inputs.rule, t - 1) * torch.cat(products, 1))
        return torch.stack(found).sum(0)


def _rate(rule: object, step: int) -> float:
    rate = at_step("lr", getattr(rule, "lr", 1.0), step)
    return float(rate) if isinstance(rate, (int, float, Tensor)) else 1.0


@dataclasses.dataclass(frozen=True)
class TRAK:
    r"""Influence functions of the linearized model, with randomly projected gradients.

    .. math:: -P \nabla m_j \cdot \Big(\sum_i w_i \frac{P \nabla \ell_i (P \nabla \ell_i)^\top}{(1 - p_i)^2} +
              \lambda I \Big)^{-1} P \nabla \ell_i, \qquad p_i = e^{-\ell_i}

    The losses are negative log-likelihoods of classes, such as cross-entropies, and :math:`w_i` are the weights of
    the training. It is a method of :func:`~metagrad.attribution.attribute`.

    Attributes:
        dim: Dimension of the projection P.
        damping: :math:`\lambda`, relative to the mean of the diagonal of the matrix.
        seed: Seed of the projection.

    References:
        Park et al., "TRAK: Attributing model behavior at scale", ICML 2023, with one model.
    """

    dim: int = 1024
    damping: float = 1e-6
    seed: int = 0

    def scores(self, trained: Trained, metrics: Metrics) -> Tensor:
        """Return the scores, ``[k, n]``."""
        state = trained.trajectory.final
        own = self._projected(metric_gradients(trained, state, metrics))
        rows, scales = list[Tensor](), list[Tensor]()
        for losses, gradients in example_gradients(trained, state):
            rows.append(self._projected(gradients))
            scales.append(-torch.expm1(-losses.double()))
        projected, scale = torch.cat(rows), torch.cat(scales).clamp(min=1e-6)
        features = projected / scale.unsqueeze(1)
        gram = features.T @ (features * trained.weights.detach().double().unsqueeze(1))
        gram.diagonal().add_(self.damping * float(gram.diagonal().mean()))
        solved: Tensor = linalg.solve(gram, own.T)
        return -(projected @ solved).T.to(trained.weights.dtype)

    def _projected(self, gradients: Tensor, block: int = 4096) -> Tensor:
        """Multiply rows by a random matrix, which is generated in blocks in float64."""
        total = gradients.new_zeros(len(gradients), self.dim, dtype=torch.float64)
        generator = torch.Generator().manual_seed(self.seed)
        for part in torch.split(gradients, block, 1):
            matrix = torch.randn(part.shape[1], self.dim, generator=generator) / self.dim**0.5
            total += part @ matrix.to(part)
        return total


@dataclasses.dataclass(frozen=True)
class Influence:
    r"""Influence functions of the trained model, with the Gauss-Newton matrix of its loss.

    .. math:: -\frac{1}{N} \nabla m_j^\top (w G + \gamma I)^{-1} \nabla \ell_i

    All examples must have one weight w. With ``average="weights"``, the matrix is :math:`w (G + \gamma I)`. The
    solves are conjugate gradients, preconditioned by EK-FAC. The sign is the sign of a derivative, opposite to
    :func:`metagrad.influence`. It is a method of :func:`~metagrad.attribution.attribute`.

    Attributes:
        damping: :math:`\gamma`.
        max_steps: Maximum number of steps for each metric.
        fisher: The Fisher matrix of EK-FAC, as for :func:`metagrad.kfac`. ``"empirical"`` accepts any loss.
        method: Method of :func:`metagrad.influence`.

    References:
        Koh, Liang, "Understanding black-box predictions via influence functions", ICML 2017.
    """

    damping: float = 0.1
    max_steps: int = 10
    fisher: Literal["exact", "sampled", "empirical"] = "sampled"
    method: str = "cg"

    def scores(self, trained: Trained, metrics: Metrics) -> Tensor:
        """Return the scores, ``[k, n]``."""
        weight = float(trained.weights.flatten()[0])
        if weight <= 0 or not bool((trained.weights == weight).all()):
            call = f"{type(self).__name__}().scores(trained)"
            refuse(call, "one weight above 0 for all examples. Replay accepts any weights", trained.weights)
        damping = self.damping / (weight if trained.training.step.average == "batch" else 1.0)
        model, final, inputs = trained.module(), trained.trajectory.final, trained.trajectory.inputs
        params = {name: p for name, p in model.named_parameters() if name in trained.params}
        rows = torch.split(torch.arange(inputs.examples.size), 1024)
        data = [inputs.examples.batch(some) for some in rows]

        def loss_fn(output: Tree, target: Tree) -> Tensor:
            value = trained.training.step.loss_fn(output, target)
            return value.mean() if value.ndim else value

        def measured(params: Params) -> Tensor:
            return metrics(trained.training.model.bound(params, final.buffers))

        of: Any = {"model": model, "loss_fn": loss_fn, "params": params, "reduction": "mean"}
        if self.method != "exact":
            of["preconditioner"] = kfac(data=data, correct=True, fisher=self.fisher, other="diagonal", **of)
        of.update(damping=damping, method=self.method, max_steps=self.max_steps)
        return -influence(train=data, queries=measured, **of).scores / weight


@dataclasses.dataclass(frozen=True)
class EKFAC(Influence):
    """:class:`Influence` with the EK-FAC inverse instead of linear solves. The ranking is less accurate.

    Example:
        >>> metagrad.attribution.EKFAC(damping=0.1).method
        'kfac'

    References:
        Grosse et al., "Studying large language model generalization with influence functions", arXiv:2308.03296.
    """

    damping: float = 0.01
    method: str = "kfac"
