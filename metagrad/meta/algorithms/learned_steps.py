"""Meta-SGD learns a learning rate for every entry. Meta-Curvature learns a matrix for every axis."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from metagrad.core.checks import check_choice
from metagrad.core.tree import LossFn, Params
from metagrad.meta.execution.tables import check_tables
from metagrad.meta.maml import MAML
from metagrad.meta.options import refuse_fixed
from metagrad.optim.rules import Hyperparameter, Rule, axis_products, chain, sgd

PER = ("entry", "tensor", "step")


class MetaSGD(MAML):
    r"""Meta-SGD: learn the initialization and the learning rates of the inner steps.

    .. math:: \phi_{t+1} = \phi_t - \alpha \circ \nabla L_i^{\mathrm{support}}(\phi_t)

    The learning rates :math:`\alpha` have the shape of the parameters. The query loss trains both. A learned rate may
    become negative. The paper uses one step, with networks of four convolutions.

    Args:
        model: The model, as in :class:`MAML`.
        loss_fn: The loss function, as in :class:`MAML`.
        lr: The initial learning rate. The paper samples it from [0.005, 0.1].
        steps: The number of inner steps.
        per: ``"entry"`` learns one rate for every entry of every parameter, as in the paper. ``"tensor"`` learns one
            rate for every parameter. ``"step"`` learns one rate for every step, so an evaluation cannot use more
            steps than training.
        **arguments: Other arguments of :class:`MAML`, except ``inner``.

    Raises:
        ValueError: If ``per`` is unknown, ``lr`` is negative, or :class:`MAML` raises for another argument.

    Example:
        >>> meta_sgd = metagrad.MetaSGD(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, lr=0.1, steps=1)
        >>> {name: tuple(p.shape) for name, p in meta_sgd.named_parameters() if "inner" in name}
        {'inner_lr_weight': (1, 2), 'inner_lr_bias': (1,)}

    References:
        Li, Zhou, Chen, Li, "Meta-SGD: learning to learn quickly for few-shot learning", arXiv:1707.09835,
        equation 4 and algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        lr: float,
        steps: int = 1,
        per: Literal["entry", "tensor", "step"] = "entry",
        **arguments: Any,
    ) -> None:
        refuse_fixed("MetaSGD", arguments, inner="it is SGD with learned rates. Pass lr=, or use MAML.")
        check_choice("MetaSGD(..., per)", per, PER)
        super().__init__(model, loss_fn, inner=sgd(lr=lr), steps=steps, **arguments)
        params = self._adapted_parameters()
        rule = sgd(lr=_rates(params, lr, per, steps))
        self.sparse = check_tables(model, self.sparse, rule, params)
        self.inner = rule


def _rates(params: Params, lr: float, per: str, steps: int) -> Hyperparameter:
    if per == "step":
        first = next(iter(params.values()))
        return nn.Parameter(first.detach().new_full((steps,), lr))

    def rate(param: Tensor) -> nn.Parameter:
        return nn.Parameter(torch.full_like(param if per == "entry" else param.new_empty(()), lr))

    return {name: rate(param.detach()) for name, param in params.items()}


class MetaCurvature(MAML):
    r"""Meta-Curvature: learn the initialization, and matrices for the axes of every parameter.

    .. math::
        \phi_{t+1} = \phi_t - \alpha \, \nabla L_i^{\mathrm{support}}(\phi_t) \times_1 M_o \times_2 M_i \times_3 M_f

    A convolution has a matrix for its outputs, its inputs and its filter. A linear layer has a matrix for its outputs
    and its inputs. A bias or a norm has a diagonal matrix. All matrices start as the identity, so the
    algorithm initially equals :class:`MAML`. The query loss trains them with the initialization. ``inner``
    receives the transformed gradients.

    A matrix for n inputs has n² entries. For 4096 inputs it needs 64 MiB.

    Args:
        model: The model, as in :class:`MAML`.
        loss_fn: The loss function, as in :class:`MAML`.
        inner: The functional optimizer that receives the transformed gradients. The paper uses SGD with a
            fixed learning rate.
        steps: The number of inner steps.
        psd: Whether to multiply by :math:`M^\top M`, which cannot reverse a gradient. This is the linear
            Kronecker-factored optimizer of Arnold et al.
        **arguments: Other arguments of :class:`MAML`. A table in ``sparse`` has a matrix only for its columns.

    Raises:
        ValueError: If :class:`MAML` raises for another argument.

    Example:
        >>> curved = metagrad.MetaCurvature(torch.nn.Linear(2, 3), torch.nn.functional.mse_loss,
        ...                                 inner=metagrad.optim.rules.sgd(lr=0.1), steps=1)
        >>> [tuple(p.shape) for name, p in curved.named_parameters() if "inner" in name]
        [(3, 3), (2, 2), (3,)]

    References:
        Park, Oliva, "Meta-Curvature", NeurIPS 2019, section 3; Arnold, Iqbal, Sha, "When MAML can adapt fast and how
        to assist when it cannot", AISTATS 2021, section 4 (Meta-KFO).
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        inner: Rule,
        steps: int,
        psd: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(model, loss_fn, inner=inner, steps=steps, **arguments)
        matrices = {
            name: _identities(p, is_table=name in self.sparse)
            for name, p in self._adapted_parameters().items()
        }
        self.inner = chain(axis_products(matrices, psd=psd), inner)


def _identities(param: Tensor, *, is_table: bool) -> tuple[nn.Parameter | None, ...]:
    """Return identity matrices for the first two axes and all further axes. For a vector, return ones."""
    if param.ndim < 2:
        return (nn.Parameter(torch.ones_like(param.detach().reshape(-1))),)
    sizes = param.flatten(2).shape if param.ndim > 2 else param.shape
    eyes = [nn.Parameter(torch.eye(n, dtype=param.dtype, device=param.device)) for n in sizes]
    return (None, *eyes[1:]) if is_table else tuple(eyes)
