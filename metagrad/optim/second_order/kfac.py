"""K-FAC: natural gradients, with the Fisher matrix of a layer taken as a Kronecker product."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from metagrad.core._torch import averaging_wrapper, current_graph_task, linalg
from metagrad.core.capture import entropy
from metagrad.core.checks import check_choice, check_count, is_a, refuse
from metagrad.core.tree import Params
from metagrad.curvature.estimators.probes import Generators
from metagrad.curvature.kronecker.factors import (
    NO_SUMS,
    Factors,
    Sums,
    diagonalized,
    rotated,
    scaling_of,
    updated,
)
from metagrad.curvature.kronecker.layers import Layer, input_rows, known_layers, output_rows, without_base
from metagrad.distributed.exchange import AVERAGED
from metagrad.optim.per_parameter import check_real
from metagrad.optim.second_order.curvature_optimizer import (
    BackwardPass,
    CurvatureOptimizer,
    label_gradients,
    options_of,
)
from metagrad.optim.torch_optim.optimizer import FAILED_FACTORIZATIONS, Group
from metagrad.sparse.tables.row_sparse import RowSparse


class LayerCall:
    """One call of a layer.

    Attributes:
        inputs: Input of the layer.
        has_bias: True if the bias is trained with the weight.
        gradient: Gradient of the output, summed over the backward passes that wrote the gradient of the weight. None
            before the first such pass.
    """

    def __init__(self, inputs: Tensor, *, has_bias: bool) -> None:
        self.inputs, self.has_bias = inputs, has_bias
        self.gradient: Tensor | None = None


class LayerHook:
    """The hooks of a layer and its weight, which report to an optimizer while the optimizer exists.

    A copied hook does nothing, because a copy of the optimizer sets its own hooks.
    """

    def __init__(self, optimizer: weakref.ref[KFAC] | None = None, name: str = "") -> None:
        self.optimizer, self.name = optimizer, name

    def __reduce__(self) -> tuple[type[LayerHook], tuple[()]]:
        return LayerHook, ()

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        """Record a call whose gradient is needed."""
        optimizer: Any = self.optimizer and self.optimizer()
        if optimizer is None or not torch.is_grad_enabled() or not output.requires_grad:
            return None
        if averaging_wrapper() is not None:
            raise ValueError(
                "KFAC(model): DistributedDataParallel averages the gradients, and the factors would be those of this "
                "process, so that parameters would drift apart. Use an optimizer that takes gradients alone."
            )
        call = optimizer._called(self.name, args[0] if args else kwargs["input"])
        if call is None:
            return None
        hooked: Any = without_base(output)

        def note(gradient: Tensor) -> None:  # the graph holds the call, which holds nothing of the graph
            optimizer: Any = self.optimizer and self.optimizer()
            if optimizer is not None:
                optimizer._returned(self.name, call, gradient.detach())

        del optimizer
        hooked.register_hook(note)
        return hooked

    def accumulated(self, weight: Tensor) -> None:
        """Report that a backward pass has written the gradient of the weight."""
        optimizer: Any = self.optimizer and self.optimizer()
        if optimizer is not None:
            optimizer._accumulated(self.name)


class KFAC(CurvatureOptimizer):
    r"""Optimize by K-FAC: natural gradients, with the Fisher matrix of a layer taken as a Kronecker product.

    .. math::
        A_k &= \epsilon_k A_{k-1} + (1 - \epsilon_k) \, \mathbb{E}[a a^\top], \qquad
        G_k = \epsilon_k G_{k-1} + (1 - \epsilon_k) \, \mathbb{E}[g g^\top], \qquad
        \epsilon_k = \min(1 - 1/k, \beta) \\
        D &= \Bigl(G + \frac{\sqrt{\gamma}}{\pi} I\Bigr)^{-1} \nabla W \, \bigl(A + \pi \sqrt{\gamma} I\bigr)^{-1},
        \qquad \pi^2 = \frac{\operatorname{tr}(A) / \dim A}{\operatorname{tr}(G) / \dim G} \\
        V &\leftarrow \nu (\mu V + D) + \lambda W, \qquad W \leftarrow W - \eta V, \qquad
        \nu = \min\bigl(1, \sqrt{\kappa / (\eta^2 D^\top \nabla)}\bigr)

    where :math:`a` are the inputs of a layer, including a 1 for its bias, and :math:`g` are the gradients of its
    outputs, which hooks record. The optimizer supports ``nn.Linear``, ``nn.Conv1d``, ``nn.Conv2d`` and
    ``nn.Conv3d``. The patches of a convolution are inputs at several positions. Parameters of other modules follow
    the plain gradient within the bound of ``kl_clip``. One warning names them. An error that names the layer is
    raised for grouped convolutions, for layers that are shared or called twice in one backward pass, and for sparse
    gradients.

    With ``fisher="empirical"`` any loop works: ``loss.backward()`` and ``opt.step()``, or a closure. With
    ``"sampled"`` the labels are sampled from the prediction of the model. This estimates the true Fisher matrix, at
    the cost of one more backward pass. The loss must then be computed in the closure, or within
    ``with opt.recording():``, by one of torch's losses, as for :class:`~metagrad.optim.SophiaG`.

    With ``fisher="empirical"``, the default, squares of gradients replace the curvature. The step is then
    close to Newton's only if the likelihood of the model is high. In a regression by squared errors, the
    squares grow with the residuals, and the Hessian does not. So steps are short if the fit is poor, and long
    if the fit is good. There ``"sampled"`` gives the Gauss-Newton matrix.

    A step with an estimate materializes the patches of a convolution. This needs the memory of its input times the
    size of its kernel. A step costs two matrix products for each layer, in the sizes of its factors. This
    cost is small for large batches or convolutions with many positions. It equals the cost of a gradient if a layer
    is three times as wide as the batch is large.

    Not supported: ``torch.compile`` of the model, gradients that are averaged over processes, and gradients that
    are not written by a backward pass, as by ``torch.autograd.grad``. Recurrent use of a layer raises an error.

    Args:
        model: Model whose parameters are trained. Hooks stay on its layers until :meth:`close`, or until the
            optimizer is deleted.
        lr: The learning rate :math:`\eta`.
        momentum: Momentum :math:`\mu`, the share of the previous step that is added.
        damping: Added to the Fisher matrix, :math:`\gamma`. It must be above 0, since the factors of few examples are
            singular.
        weight_decay: Weight decay :math:`\lambda`: :math:`\lambda w` is added to the direction.
        decay: Decay rate :math:`\beta` of the running averages, below 1. The k-th average uses ``1 - 1 / k`` if this
            is smaller.
        curvature_every: Steps from one estimate of the factors to the next. The first step makes an estimate.
        inverse_every: Steps from one inverse to the next, a multiple of ``curvature_every``.
        kl_clip: Upper bound of :math:`\eta^2 D^\top \nabla` over all parameters of a group, :math:`\kappa`.
            If the bound is exceeded, the direction and the momentum are multiplied by :math:`\nu`. None means no
            bound.
        fisher: The labels: ``"empirical"`` takes the labels of the data, ``"sampled"`` draws them from the model, for
            losses of known form.
        loss_reduction: Whether the loss is the ``"mean"`` over examples, or the ``"sum"``. Only ``"empirical"`` uses
            it.
        eigen: Correct the eigenvalues of the Kronecker product by second moments of the examples' gradients (EKFAC).
            ``damping`` is then added to these moments.
        maximize: Maximize the loss: negate the gradient.
        nonfinite: Reaction if the loss, a gradient or the curvature is NaN or infinite, or a matrix cannot be
            factorized. ``"raise"`` raises an error. ``"skip"`` leaves the step out and counts it in ``opt.stats``.
            Parameters and state do not change.
        params: Groups of the model's parameters with their own hyperparameters. Other parameters do not change. A
            layer belongs to the group of its weight. A bias in another group follows the plain gradient.
        seed: Seed of the random numbers, which also depend on the number of the step. None means
            ``torch.initial_seed()``.

    Raises:
        ValueError: A hyperparameter is out of its range. A layer with a parameter in ``params`` is grouped or shared.
        TypeError: A parameter is complex, or a hyperparameter is not a number.

    Example:
        >>> from metagrad.optim import KFAC
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> opt = KFAC(model, lr=0.1)
        >>> loss = torch.nn.functional.mse_loss(model(torch.eye(2)), torch.tensor([[3.0], [7.0]]))
        >>> loss.backward()
        >>> opt.step()

    References:
        Martens, Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", ICML 2015;
        Grosse, Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers", ICML 2016; George et
        al., "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis", NeurIPS 2018; Ba, Grosse,
        Martens, "Distributed second-order optimization using Kronecker-factored approximations", ICLR 2017, for
        ``kl_clip``; Kunstner, Balles, Hennig, "Limitations of the empirical Fisher approximation for natural gradient
        descent", NeurIPS 2019, for what ``"empirical"`` is not.
    """

    counts = ("curvature_every", "inverse_every")
    notes_losses = True
    differentiates_twice = False

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 0.1,
        *,
        momentum: float | Tensor = 0.9,
        damping: float | Tensor = 1e-2,
        weight_decay: float | Tensor = 0.0,
        decay: float | Tensor = 0.95,
        curvature_every: int = 10,
        inverse_every: int = 10,
        kl_clip: float | Tensor | None = 1e-3,
        fisher: Literal["empirical", "sampled"] = "empirical",
        loss_reduction: Literal["mean", "sum"] = "mean",
        eigen: bool = False,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
        params: Sequence[dict[str, Any]] | None = None,
        seed: int | None = None,
    ) -> None:
        defaults = options_of(locals())
        if not is_a(model, nn.Module):
            raise TypeError(
                f"KFAC(model): model must be the nn.Module whose layers are observed, got {type(model).__name__}. "
                "Pass the model itself; params= takes groups of its parameters."
            )
        for name, p in model.named_parameters():
            check_real("KFAC(model)", name, p)
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._handles: list[RemovableHandle] = []
        self._places: dict[Tensor, int] = {}  # the group of each parameter
        self._initialize(model.named_parameters() if params is None else params, defaults)
        own = {p for group in self.param_groups for p in group["params"]}
        layers = known_layers("KFAC(model)", model, own).values()
        self._layers: dict[str, Layer] = {self._names[layer.weight]: layer for layer in layers}
        self._set_hooks()

    def close(self) -> None:
        """Remove the hooks from the model. The factors do not change."""
        _remove(self._handles)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_names", "_layers", "_handles", "_places")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._handles:
            _remove(self._handles)  # the inert ones of the copied model
            self._set_hooks()

    def _set_hooks(self) -> None:
        for name, layer in self._layers.items():
            hook, weight = LayerHook(weakref.ref(self), name), cast("Any", layer.weight)
            self._handles += [
                layer.register_forward_hook(hook, prepend=True, with_kwargs=True),
                weight.register_post_accumulate_grad_hook(hook.accumulated),
            ]
        weakref.finalize(self, _remove, self._handles)

    def _check_group(self, index: int) -> None:
        super()._check_group(index)
        for key, p in self._named(index).items():
            self._names.setdefault(p, key)
        group, call = self.param_groups[index], "KFAC(params)"
        check_choice(f"{call}: fisher", group["fisher"], ("empirical", "sampled"))
        check_choice(f"{call}: loss_reduction", group["loss_reduction"], ("mean", "sum"))
        check_count(f"{call}, curvature_every", group["curvature_every"])
        if group["inverse_every"] % group["curvature_every"]:
            refuse(f"{call}: inverse_every", "a multiple of curvature_every", group["inverse_every"])
        if group["fisher"] != self.param_groups[0]["fisher"]:
            raise ValueError("KFAC(model): fisher must be the same in all groups.")
        self._places.update(dict.fromkeys(group["params"], index))

    # Hooks

    def _called(self, name: str, inputs: Tensor) -> LayerCall | None:
        """Record a layer's call, if its gradient is needed."""
        group = self._group_of(self._layers[name].weight)
        if group is None or not inputs.numel():  # no examples have no mean
            return None
        if not self._is_due(group) and not self._lacks_factors(name):
            return None
        if name in self._calls and not group["eigen"]:  # only sums of an earlier micro-batch are kept
            self._sums[name] = self._sums.get(name, NO_SUMS).plus(self._rows(name))
            del self._calls[name]
        return LayerCall(inputs.detach(), has_bias=self._trains_bias(self._layers[name]))

    def _returned(self, name: str, call: LayerCall, gradient: Tensor) -> None:
        """Take the gradient of a call's output. It counts once the backward pass writes the weight's gradient."""
        if not (self._draws or self.param_groups[0]["fisher"] == "empirical"):
            return
        if self._layers[name].weight.grad is None:  # earlier calls belong to a gradient that was dropped
            for dropped in self._calls.pop(name, ()):
                dropped.gradient = None
            self._sums.pop(name, None)
        task = current_graph_task()
        other, task_of_other = self._latest.get(name, (call, task))
        if other is not call and task_of_other == task:
            raise ValueError(
                f"KFAC: the layer of {name!r} was called twice in one backward pass, and the factors of shared "
                "layers are not known. Use a layer of its own for each call, call backward() for each micro-batch, "
                "or use another optimizer."
            )
        self._latest[name] = call, task
        self._pending[name] = call, gradient
        if self._draws:
            self._accumulated(name)

    def _accumulated(self, name: str) -> None:
        """Count the calls of a backward pass that has written the gradient of a layer's weight.

        A gradient with respect to an input, such as a saliency map, writes none and does not count.
        """
        if name in self._pending:
            call, gradient = self._pending.pop(name)
            if call.gradient is None:
                self._calls.setdefault(name, []).append(call)
            call.gradient = gradient if call.gradient is None else call.gradient + gradient

    def _rows(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs of a layer's calls and the gradients of their outputs as rows, in float32 or better."""
        layer = self._layers[name]
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        for call in self._calls.get(name, []):
            assert call.gradient is not None
            inputs = input_rows(layer, call.inputs, has_bias=call.has_bias)
            yield inputs.to(dtype), output_rows(layer, call.gradient).to(dtype)

    def _trains_bias(self, layer: Layer) -> bool:
        """Return whether the bias of a layer is trained with the weight, as the weight of one more input."""
        bias = layer.bias
        return (
            bias is not None and bias.requires_grad and self._group_of(bias) is self._group_of(layer.weight)
        )

    def _group_of(self, param: Tensor) -> Group | None:
        return self.param_groups[self._places[param]] if param in self._places else None

    def _lacks_factors(self, name: str) -> bool:
        """Return whether the factors of a layer are missing or have another size, as after freezing its bias."""
        layer = self._layers[name]
        num_inputs = layer.weight[0].numel() + self._trains_bias(layer)
        known = self.state.get(layer.weight, {}).get("inputs")
        return known is None or len(known) != num_inputs

    def _forget(self) -> None:
        super()._forget()
        self._calls: dict[str, list[LayerCall]] = {}
        # The last call of each layer with a gradient, and its backward pass.
        self._latest: dict[str, tuple[LayerCall, int]] = {}
        self._pending: dict[str, tuple[LayerCall, Tensor]] = {}
        self._sums: dict[str, Sums] = {}
        self._draws = False

    def _is_curvature_due(self) -> bool:
        if self.param_groups[0]["fisher"] != "sampled":
            return False
        weights = {name: layer.weight for name, layer in self._layers.items()}
        trained = (name for name, w in weights.items() if w.requires_grad and self._group_of(w) is not None)
        return super()._is_curvature_due() or any(map(self._lacks_factors, trained))

    def _observe(self, graph: BackwardPass) -> None:
        """Sample labels, and send the gradients of their losses through the hooks of the layers."""
        first = self.param_groups[0]
        generators = Generators(entropy(first["seed"], first["step"]))
        weights = [layer.weight for layer in self._layers.values() if layer.weight in graph.grads]
        if not weights:
            return
        self._draws = True
        try:
            for _ in label_gradients(graph.losses, weights, generators, retain_graph=graph.retain_graph):
                pass  # the hooks take the gradients of the outputs
        finally:
            self._draws = False

    # Steps

    def _move(self) -> None:
        """Update every parameter that has a gradient, or none if anything is not finite."""
        if len(AVERAGED):  # of any optimizer
            self._refuse_averaged()
        is_scaled = hasattr(self, "found_inf")
        if is_scaled and not self._unscaled():
            return
        params: Params = {self._names[p]: p for p in self._places if p.grad is not None and p.numel()}
        for name, p in params.items():
            if isinstance(p.grad, RowSparse) or (p.grad is not None and p.grad.layout != torch.strided):
                raise self._without_rows(name)
        for name in self._calls:
            self._sums[name] = self._sums.get(name, NO_SUMS).plus(self._rows(name))
        seen: list[Any] = [] if is_scaled else [("the loss", loss) for loss in self._losses]
        seen += [(f"the gradient of {name!r}", p.grad) for name, p in params.items()]
        for name, sums in self._sums.items():
            seen += [(f"the factors of {name!r}", sums.inputs), (f"the factors of {name!r}", sums.outputs)]
        if not self._are_finite(seen):
            return
        try:
            steps = [self._step(group, params) for group in self.param_groups]
        except FAILED_FACTORIZATIONS:
            if not self._leaves_out():
                raise
            return
        directions = {f"the direction of {name!r}": d for own, _, _ in steps for name, d in own.items()}
        if not self._are_finite(list(directions.items())):
            return
        for group, (own, length, blocks) in zip(self.param_groups, steps, strict=True):
            lr, momentum, decay = (float(group[name]) for name in ("lr", "momentum", "weight_decay"))
            group["step"] += 1
            for name, direction in own.items():
                p, state = params[name], self.state[params[name]]
                state.update(blocks.get(name, {}))
                state["step"] = state.get("step", 0) + 1
                change = -direction if group["maximize"] else direction
                if momentum and "momentum" in state:
                    change = change + momentum * state["momentum"]
                change = change * length + decay * p.to(change.dtype)
                if momentum:
                    state["momentum"] = change
                p.copy_(p.to(change.dtype) - lr * change)

    def _step(self, group: Group, params: Params) -> tuple[Params, float | Tensor, dict[str, Any]]:
        """Return the directions of a group, the factor that clips them, and the new states of layers."""
        own = {name: params[name] for name in map(self._names.__getitem__, group["params"]) if name in params}
        damping = float(group["damping"])
        directions: Params = {
            name: p.grad.to(torch.promote_types(p.dtype, torch.float32))
            for name, p in own.items()
            if p.grad is not None
        }
        grads, blocks = list(directions.items()), dict[str, Any]()
        for name in [name for name in own if name in self._layers]:
            p, bias, block = own[name], self._layers[name].bias, self.state.get(own[name], {})
            if name in self._sums:
                block = blocks[name] = self._block(group, name, block, damping)
            if "updates" not in block:
                raise RuntimeError(
                    f"KFAC.step: {name!r} has a gradient, but no curvature: the call of its layer was not seen, or "
                    "no labels were drawn. The forward pass must run after KFAC(model) was made, by calling the "
                    "layer outside of torch.compile, and loss.backward() must write the gradient. "
                    'With fisher="sampled", use opt.step(closure) or `with opt.recording():`.'
                )
            gradient = directions[name].flatten(1)
            if bias is not None and len(block["inputs"]) > gradient.shape[1]:
                column = torch.zeros_like(bias) if bias.grad is None else bias.grad
                gradient = torch.cat([gradient, column.to(gradient.dtype).unsqueeze(1)], 1)
            gradient = gradient.to(block["inputs"].dtype)
            if "scaling" in block:
                left, right = block["output_basis"], block["input_basis"]
                scaled = rotated(left.mT, gradient, right) / (block["scaling"] + damping)
                direction = rotated(left, scaled, right.mT)
            else:
                direction = block["output_inverse"] @ gradient @ block["input_inverse"]
            directions[name] = direction[:, : p[0].numel()].reshape(p.shape).contiguous()
            if direction.shape[1] > p[0].numel() and bias is not None and bias.grad is not None:
                directions[self._names[bias]] = direction[:, -1].contiguous()
        length: float | Tensor = 1.0
        if group["kl_clip"] is not None and directions:
            pairs = [(directions[name], g) for name, g in grads]
            changes = [linalg.vecdot(d.flatten(), g.to(d.dtype).flatten()) for d, g in pairs]
            change = float(group["lr"]) ** 2 * torch.stack([c.to(changes[0]) for c in changes]).sum()
            # The root is needed only if a direction is too long, and a change can be 0.
            clip = float(group["kl_clip"])
            is_long = change > clip
            length = torch.where(is_long, (clip / torch.where(is_long, change, 1)).sqrt(), 1)
        return directions, length, blocks

    def _block(self, group: Group, name: str, block: Mapping[str, Any], damping: float) -> dict[str, Any]:
        """Return the block of a layer, updated by the calls since the last step."""
        sums, is_sampled, decay = self._sums[name], group["fisher"] == "sampled", float(group["decay"])
        scale = self._inverse_scale() if hasattr(self, "found_inf") else 1.0
        # The gradients of a mean over N examples have a factor 1 / N each, and its root for sampled labels.
        weight = scale * (1 if is_sampled else scale)
        weight *= sums.num_examples if group["loss_reduction"] == "mean" and not is_sampled else 1
        if "inputs" in block and block["inputs"].shape != sums.inputs.shape:
            block = {}
        is_due = not block or group["step"] % group["inverse_every"] == 0
        if not group["eigen"]:
            return updated(block, sums, weight, decay, damping=damping if is_due else None)

        def squares(basis: Factors) -> Tensor:
            return weight * torch.stack([scaling_of(*rows, basis) for rows in self._rows(name)]).sum(0)

        return diagonalized(updated(block, sums, weight, decay), squares, decay, is_due=is_due)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
