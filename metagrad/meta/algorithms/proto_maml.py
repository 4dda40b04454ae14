"""Proto-MAML: the inner steps start from a prototypical network."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from metagrad.core._torch import named_modules
from metagrad.core.checks import is_a
from metagrad.core.tree import LossFn, Params, widened
from metagrad.meta.algorithms.heads import read_classes
from metagrad.meta.inner.loop import InnerLoop
from metagrad.meta.maml import MAML
from metagrad.meta.objective.structured import Nested, call_on
from metagrad.meta.objective.tasks import Tasks
from metagrad.meta.objective.vmap import substituted, values_for, vmapped
from metagrad.optim.rules import Rule
from metagrad.sparse.tables.embedding import embedding


class ProtoMAML(MAML):
    r"""Proto-MAML: the initial head of each task makes the model a prototypical network.

    .. math::
        w_k = 2 c_k, \quad b_k = -\lVert c_k \rVert^2, \qquad
        c_k = \frac{1}{|S_k|} \sum_{x \in S_k} f_\theta(x)

    Here :math:`S_k` are the support examples of class k, and the embedding :math:`f_\theta` is the input of the head.
    All parameters are adapted from this initialization. With ``steps=0`` the model is the prototypical network. The
    meta-gradient includes the prototypes, as in the paper, also with ``order=1`` (some implementations detach them).
    The parameters of the head in the model are not used. Every task must have as many classes as the head has
    outputs. Classes may differ in size.

    Args:
        model: A classifier that ends in a linear layer.
        loss_fn: The loss function, such as cross-entropy.
        inner: The functional optimizer of the inner steps.
        steps: The number of inner steps.
        head: The name of the last layer, an ``nn.Linear`` with bias.
        **arguments: Other arguments of :class:`MAML`.

    Raises:
        ValueError: If ``head`` is not an ``nn.Linear`` with bias, or :class:`MAML` raises for another argument. A
            call raises if a class of a task has no support example.
        TypeError: As in :class:`MAML`.

    Example:
        >>> model = metagrad.models.Conv4(5, hidden=8)
        >>> learner = metagrad.ProtoMAML(model, torch.nn.functional.cross_entropy,
        ...                              inner=metagrad.optim.rules.sgd(lr=0.01), steps=2)
        >>> x, y = torch.randn(2, 5, 1, 28, 28), torch.arange(5).repeat(2, 1)
        >>> learner(((x, y), (x, y))).loss.backward()
        >>> model.blocks[0][0].weight.grad is None, model.head.weight.grad is None
        (False, True)

    References:
        Triantafillou, Zhu, Dumoulin, Lamblin, Evci, Xu, Goroshin, Gelada, Swersky, Manzagol, Larochelle,
        "Meta-Dataset: A dataset of datasets for learning to learn from few examples", ICLR 2020, section 3.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        inner: Rule,
        steps: int,
        head: str = "head",
        **arguments: Any,
    ) -> None:
        self.head_name = head
        super().__init__(model, loss_fn, inner=inner, steps=steps, **arguments)
        self._head(model)

    def _head(self, model: nn.Module) -> nn.Linear:
        """Return the head. Raise unless it is a linear layer with bias."""
        layer = dict(named_modules(model)).get(self.head_name)
        if isinstance(layer, nn.Linear) and is_a(layer.bias, Tensor):
            return layer
        linear = [name for name, module in named_modules(model) if isinstance(module, nn.Linear)]
        shown = "no module" if layer is None else f"a {type(layer).__name__}"
        raise ValueError(
            f"ProtoMAML(..., head): prototypes make a linear layer with bias, but {self.head_name!r} is {shown} of "
            f"the model that could be one. Its linear layers are {linear}."
        )

    def _inner_loop(self, steps: int, tasks: Tasks) -> InnerLoop:
        ways = self._head(self.model).out_features
        classes = read_classes("ProtoMAML(batch)", tasks, self.loss_fn)
        if classes.differ or classes.ways != ways:
            raise ValueError(
                f"ProtoMAML(batch): {self.head_name!r} has {ways} outputs, so every task must have support examples "
                f"of the classes 0..{ways - 1}. Sample every class, or give the head as many outputs as classes."
            )
        return super()._inner_loop(steps, tasks)

    def _start(self, model: nn.Module, params: Params, tasks: Tasks, stacked: bool) -> Params:
        """Return the initial weight and bias of the head for each task."""
        assert isinstance(tasks.support_y, Tensor)
        if missing := [n for n in ("weight", "bias") if f"{self.head_name}.{n}" not in params]:
            raise ValueError(
                f"ProtoMAML(..., head): prototypes replace the weight and the bias of {self.head_name!r}, but its "
                f"{missing[0]} is not adapted. It must require grad, be in adapt, be used by no other layer and have "
                "no parametrization."
            )
        compute: Callable[..., Params] = functools.partial(self._prototypes, model, params)
        compute = vmapped(compute) if stacked else compute
        tables = {name: embedding(rows, params[name]) for name, rows in tasks.rows.items()}
        return compute(tasks.rows, tables, tasks.support_x, tasks.support_y)

    def _prototypes(
        self, model: nn.Module, params: Params, rows: Params, tables: Params, x: Nested, y: Tensor
    ) -> Params:
        """Return the initial weight and bias for the support examples of one task."""
        layer = self._head(model)
        with substituted(model, values_for(model, {**params, **tables}, rows, self.sparse)):
            features = _given(model, layer, x, y.shape[0])
        with torch.autocast(features.device.type, enabled=False):
            weight = params[f"{self.head_name}.weight"]
            features = widened(features.to(weight.dtype))
            members = torch.arange(layer.out_features, device=y.device).unsqueeze(1) == y
            members = members.to(features.dtype)
            prototypes = members @ features / members.sum(1, keepdim=True)
            start = {"weight": 2 * prototypes, "bias": -prototypes.square().sum(1)}
            return {f"{self.head_name}.{name}": value.to(weight.dtype) for name, value in start.items()}


def _given(model: nn.Module, layer: nn.Linear, x: Nested, count: int) -> Tensor:
    """Return the input of the head, ``[examples, features]``."""
    given: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append(args[0] if args else kwargs["input"])

    handle = layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        call_on(model, x)
    finally:
        handle.remove()
    shapes = [tuple(tensor.shape) for tensor in given]
    if shapes != [(count, layer.in_features)]:
        raise ValueError(
            "ProtoMAML(batch): the model must call the head once, with an embedding for each example, "
            f"{(count, layer.in_features)}, but it was called {len(shapes)} times, with {shapes}."
        )
    return given[0]
