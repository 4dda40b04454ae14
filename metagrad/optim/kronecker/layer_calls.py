"""The calls of the layers of a model in one evaluation of a loss: inputs, and gradient edges of the outputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from metagrad.core import _torch
from metagrad.core._torch import Function
from metagrad.optim.curvature import Kronecker
from metagrad.optim.kronecker.factors import Factors, factors_of, sums_of
from metagrad.optim.kronecker.layers import Layer, layer_rows, layers_among, without_base
from metagrad.optim.rule import Params

CALL = "kfac(...)"


class LayerCall(NamedTuple):
    """One call of a layer.

    The output is identified by its gradient edge, where a gradient arrives also if the tensor is overwritten.
    """

    inputs: Tensor
    output: GradientEdge
    is_stacked: bool  # whether the first axes of both count tasks


class LayerCalls:
    """The calls of the layers of a model, by the names of their weights, each of which is called once.

    Args:
        model: The model.
        names: Of the parameters that are adapted; a layer is one whose weight is among them.

    Raises:
        ValueError: A layer is grouped, or shares a parameter.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        keys = {id(p): name for name, p in model.named_parameters() if name in names}
        layers = layers_among(CALL, model, lambda p: id(p) in keys).values()
        self.layers: dict[str, Layer] = {keys[id(layer.weight)]: layer for layer in layers}
        self._biased = {key for key, layer in self.layers.items() if id(layer.bias) in keys}
        self._calls: dict[str, LayerCall] = {}

    def hook_of(self, key: str) -> Callable[[nn.Module, tuple, dict, Tensor], Tensor]:
        """Return the forward hook of the layer whose weight has a name."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            inputs = args[0] if args else kwargs["input"]
            note = functools.partial(self._note, key)
            if _torch.functorch_is_active():
                return _Unstacked.apply(note, inputs, output)  # type: ignore[return-value]
            return note(inputs, output, is_stacked=False)

        return hook

    def _note(self, key: str, inputs: Tensor, output: Tensor, *, is_stacked: bool) -> Tensor:
        if key in self._calls:
            raise ValueError(
                f"{CALL}: the layer of {key!r} was called twice in one evaluation of the loss, and the factors of "
                "shared layers are not known. Use a layer of its own for each call, or another rule."
            )
        if not output.requires_grad or _torch.functorch_is_active():
            raise ValueError(
                f"{CALL}: the layer of {key!r} was called where the tape does not see it: without grad mode, in a "
                "checkpoint, or in a transform of torch.func within the model. Call it plainly, or use another rule."
            )
        output = without_base(output)
        self._calls[key] = LayerCall(inputs, get_gradient_edge(output), is_stacked)
        return output

    def factors(
        self,
        params: Params,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        *,
        stacked: bool,
        request: Kronecker,
        create_graph: bool,
    ) -> dict[str, Factors]:
        """Return the factors of each layer that outputs depend on.

        Args:
            params: The parameters that the layers had.
            outputs: What is differentiated.
            cotangents: Their cotangents: of the output of a layer, they give the gradients g.
            stacked: Whether parameters have an axis of tasks in front, each of which has factors of its own.
            request: Of which Fisher matrix the cotangents are.
            create_graph: Put the factors on the tape.

        Raises:
            ValueError: A layer has a part in the outputs without having been called, or was called for all tasks at
                once.
        """
        gradients = functools.partial(
            torch.autograd.grad,
            outputs,
            grad_outputs=cotangents,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
        self._check(params, gradients, stacked)
        if not self._calls:
            return {}
        found = gradients([call.output for call in self._calls.values()])
        pairs = zip(self._calls, found, strict=True)
        rows = {key: self._rows(key, g) for key, g in pairs if g is not None and g.numel()}
        if not create_graph:
            rows = {key: (inputs.detach(), g.detach()) for key, (inputs, g) in rows.items()}
        sums = {key: sums_of(*pair) for key, pair in rows.items()}
        return {key: factors_of(s, request.weight(s.num_examples)) for key, s in sums.items()}

    def _check(self, params: Params, gradients: Callable[..., Any], stacked: bool) -> None:
        uncalled = [key for key in self.layers if key not in self._calls]
        used = gradients([params[key] for key in uncalled]) if uncalled else []
        for key, gradient in zip(uncalled, used, strict=True):
            if gradient is not None:
                raise ValueError(
                    f"{CALL}: {key!r} has a gradient, but its layer was not called: its weight is used by hand. Call "
                    "the layer, or use another rule."
                )
        for key, call in self._calls.items():
            if call.is_stacked != stacked:
                raise ValueError(
                    f"{CALL}: the layer of {key!r} was called within a torch.vmap of the model's own, where it is "
                    "several layers. Call it plainly, or use another rule."
                )

    def _rows(self, key: str, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and output gradients of a layer as rows ``[*tasks, examples, positions, size]``."""
        call = self._calls[key]
        rows = functools.partial(layer_rows, self.layers[key], has_bias=key in self._biased)
        return (torch.vmap(rows) if call.is_stacked else rows)(call.inputs, gradient)


class _Unstacked(Function):
    """Note a call within a vmap over tasks, by the tensors that stack those of the tasks."""

    @staticmethod
    def forward(note, inputs, output):
        raise ValueError(
            f"{CALL}: a layer was called in a transform of torch.func that is not the vmap over tasks, where the "
            "tape does not see it. Evaluate the loss outside of the transform, or use another rule."
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        raise NotImplementedError

    @staticmethod
    def vmap(info, in_dims, note, inputs, output):
        a, y = (
            _tasks_first(*pair, info.batch_size) for pair in zip((inputs, output), in_dims[1:], strict=True)
        )
        return note(a, y, is_stacked=True), 0


def _tasks_first(tensor: Tensor, axis: int | None, num_tasks: int) -> Tensor:
    if axis is None:
        return tensor.expand(num_tasks, *tensor.shape)
    return tensor if axis == 0 else tensor.movedim(axis, 0)


@contextlib.contextmanager
def observed(model: nn.Module, names: Sequence[str]) -> Generator[LayerCalls]:
    """Note the calls of the layers of a model.

    Args:
        model: The model; hooks are on its layers meanwhile.
        names: As for :class:`LayerCalls`.
    """
    calls = LayerCalls(model, names)
    handles = [
        layer.register_forward_hook(calls.hook_of(key), with_kwargs=True)
        for key, layer in calls.layers.items()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
