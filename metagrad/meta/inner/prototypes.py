"""A linear head computed from the prototypes of the classes, as the start of a head in each task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metagrad.core._torch import named_modules
from metagrad.core.checks import is_a
from metagrad.core.structured import call_on, structured
from metagrad.core.tree import widened
from metagrad.optim.rules import Params


@dataclass(frozen=True)
class Prototypes:
    r"""Start a linear head from the prototypes of the classes, in each task.

    .. math::
        c_k = \frac{1}{|S_k|} \sum_{x \in S_k} f_\theta(x), \qquad
        w_k = 2 c_k, \quad b_k = -\lVert c_k \rVert^2

    so that its logits order the classes by the distance of an embedding to their prototypes, as a prototypical
    network does. The embedding :math:`f_\theta(x)` is the input of the head. Labels are 0 to ways - 1, where the
    head has ``ways`` outputs, and every class has a support example in every task.

    Args:
        head: The name of an ``nn.Linear`` with bias, which the model calls once, with a row for each example.
        ignore_index: The label of support examples that belong to no class, such as padding.

    Raises:
        ValueError: When called: there is no such module, it is called otherwise, a label is out of range, or a class
            has no example.
        TypeError: When called: the module is no ``nn.Linear`` with bias, or labels are no integers.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(1, 2))
        >>> x, y = torch.tensor([[1.0], [3.0], [-5.0]]), torch.tensor([0, 0, 1])
        >>> start = metagrad.meta.Prototypes("1")(model, x, y)
        >>> start["1.weight"].tolist(), start["1.bias"].tolist()
        ([[4.0], [-10.0]], [-4.0, -25.0])

    References:
        Snell, Swersky, Zemel, "Prototypical networks for few-shot learning", NIPS 2017, section 2.4.
        Triantafillou et al., "Meta-Dataset: A dataset of datasets for learning to learn from few examples",
        ICLR 2020, section 3.
    """

    head: str = "head"
    ignore_index: int = -100

    def __call__(self, model: nn.Module, x: Any, y: Tensor) -> Params:
        """Return weight and bias for the support examples of one task."""
        layer = self.layer(model)
        embedding = self._embedding(model, layer, x, y.shape[0])
        with torch.autocast(embedding.device.type, enabled=False):
            embedding = widened(embedding.to(layer.weight.dtype))
            members = torch.arange(layer.out_features, device=y.device).unsqueeze(1) == y
            members = members.to(embedding.dtype)
            prototypes = members @ embedding / members.sum(1, keepdim=True)
            start = {"weight": 2 * prototypes, "bias": -prototypes.square().sum(1)}
            return {f"{self.head}.{name}": value.to(layer.weight.dtype) for name, value in start.items()}

    def layer(self, model: nn.Module) -> nn.Linear:
        """Return the head of a model; refuse one that is not a linear layer with bias."""
        linear = [name for name, module in named_modules(model) if isinstance(module, nn.Linear)]
        known = (
            f"The linear layers of the model are {', '.join(map(repr, linear))}."
            if linear
            else "It has none."
        )
        try:
            layer = model.get_submodule(self.head)
        except AttributeError:
            raise ValueError(f"Prototypes(head): the model has no module {self.head!r}. {known}") from None
        if not isinstance(layer, nn.Linear) or not is_a(layer.bias, Tensor):
            kind = f"a {type(layer).__name__}{' without bias' if isinstance(layer, nn.Linear) else ''}"
            raise TypeError(
                f"Prototypes(head): prototypes make a linear layer with bias, but {self.head!r} is {kind}. {known}"
            )
        return layer

    def check(self, model: nn.Module, x: Any, y: Any) -> None:
        """Refuse invalid labels ``[tasks, examples]``, and classes without an example."""
        ways = self.layer(model).out_features
        if not isinstance(y, Tensor) or y.is_floating_point() or y.ndim != 2:
            form = f"a {y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise TypeError(
                f"Prototypes(...): support targets must be class labels, integers [tasks, examples], got {form}."
            )
        is_member = y.unsqueeze(-1) == torch.arange(ways, device=y.device)
        known, present = is_member.any(-1) | (y == self.ignore_index), is_member.any(1)
        if bool(known.all() & present.all()):
            return
        if not bool(known.all()):
            task, example = (int(i) for i in (~known).nonzero()[0])
            raise ValueError(
                f"Prototypes(...): labels must lie in 0..{ways - 1}, since {self.head!r} has {ways} outputs, but "
                f"example {example} of task {task} has {int(y[task, example])}. Relabel the classes of each task."
            )
        task, way = (int(i) for i in (~present).nonzero()[0])
        raise ValueError(
            f"Prototypes(...): class {way} of task {task} has no support example (both count from 0), so it has no "
            f"prototype. Sample every class, or give {self.head!r} as many outputs as there are classes."
        )

    def _embedding(self, model: nn.Module, layer: nn.Linear, x: Any, count: int) -> Tensor:
        """Return what the head is given, ``[examples, features]``."""
        given: list[Tensor] = []

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given.append(args[0] if args else kwargs["input"])

        handle = layer.register_forward_pre_hook(note, with_kwargs=True)
        try:
            call_on(model, structured(x, "Prototypes(...): the support inputs"))
        finally:
            handle.remove()
        shapes = [tuple(tensor.shape) for tensor in given]
        if shapes != [(count, layer.in_features)]:
            raise ValueError(
                f"Prototypes(...): the model must call {self.head!r} once, with an embedding for each example, "
                f"{(count, layer.in_features)}, but it was called {len(shapes)} times, with {shapes}."
            )
        return given[0]
