"""The loss that a closure computes, for second-order rules: its curvature, its values at other parameters."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from metagrad.core.capture import RandomState
from metagrad.core.tree import HALF, widened
from metagrad.distributed.averaged import Mean
from metagrad.optim.curvature import Diagonal
from metagrad.optim.objective import fisher_products
from metagrad.optim.probes import Generators, drawn_like, torchs_own
from metagrad.optim.rule import Params
from metagrad.optim.tape_curvature import TapeCurvature, WeightedLoss
from metagrad.optim.torch_optim.curvature_optimizer import LossRecorder


class KnownPart(NamedTuple):
    """A loss of known form, and the parameters that its output depends on."""

    loss: WeightedLoss
    leaves: frozenset[Tensor]


class BackwardPass(NamedTuple):
    """One call of ``backward``, whose graph is alive."""

    value: Tensor  # what was differentiated, 0-d
    grads: Mapping[Tensor, Tensor]  # the gradient of each leaf
    parts: Sequence[KnownPart]


_ALONE = Mean()


class GraphCurvature:
    """The curvature of a sum of losses whose graphs are alive, in some of the parameters.

    Args:
        params: Parameters by name.
        passes: The losses.
        curved: Those whose curvature is taken, if others: of a part of the data.
        inverse_scale: What undoes the scale of the losses.
        mean: Over processes, of losses that each has of its own.
        curved_mean: That of ``curved``.
        generators: Where the random numbers of estimates come from.

    Attributes:
        value: The sum of the losses.
    """

    def __init__(
        self,
        params: Params,
        passes: Sequence[BackwardPass],
        curved: Sequence[BackwardPass] | None = None,
        *,
        inverse_scale: float = 1.0,
        mean: Mean = _ALONE,
        curved_mean: Mean = _ALONE,
        generators: Generators = torchs_own,
    ) -> None:
        self._params = params
        self._passes = passes
        self._curved = passes if curved is None else curved
        self._inverse_scale = inverse_scale
        self._mean = mean
        self._curved_mean = mean if curved is None else curved_mean
        self._generators = generators
        self._sums: list[Tensor] = []  # of each product
        values = [widened(one.value) for one in passes]
        own = torch.stack(values).sum() if values else self._zero()
        (self.value,) = mean.of([inverse_scale * own])

    @property
    def total(self) -> Tensor:
        """The sum of the elements of all products so far, which is finite if they are."""
        return torch.stack(self._sums).sum() if self._sums else self._zero()

    def products(self, v: Params) -> Params:
        """Return the Hessian times ``v``."""
        return self._averaged(self._own_products(v))

    def _own_products(self, v: Params) -> Params:
        return self._at_size_one(
            v, lambda u: self._added(tape.products(_in_dtypes_of(params, u)) for params, tape in self._tapes)
        )

    def _at_size_one(self, v: Params, multiply: Callable[[Params], Params]) -> Params:
        """Multiply ``v``; in half precision, in which it may vanish or its product overflow, at size one."""
        if not any(p.dtype in HALF for p in self._params.values()):
            return multiply(v)
        size = torch.stack([widened(values).abs().amax() for values in v.values()]).amax()
        size = torch.where(size == 0, 1, size)
        products = multiply({key: widened(values) / size for key, values in v.items()})
        return {key: size * product for key, product in products.items()}

    def product_of_vector(self, v: Tensor) -> Tensor | None:
        """Return the Hessian times all elements in one vector; None where :meth:`products` is to be asked."""
        is_plain = len(self._tapes) == 1 and self._inverse_scale == 1 and self._curved_mean.group is None
        if not is_plain or len(self._tapes[0][0]) < len(self._params):
            return None
        tape = self._tapes[0][1]
        product = tape.product_of_vector(v) if next(iter(self._params.values())).dtype == v.dtype else None
        if product is not None:
            self._sums.append(product.sum())
        return product

    @functools.cached_property
    def _tapes(self) -> list[tuple[Params, TapeCurvature]]:
        """The Hessian of each loss, in the parameters that it depends on."""
        found = []
        for one in self._curved:
            params = {key: p for key, p in self._params.items() if p in one.grads}
            found.append((params, TapeCurvature(params, {key: one.grads[p] for key, p in params.items()})))
        return found

    def gauss_newton_products(self, v: Params) -> Params:
        """Return the Gauss-Newton matrix times ``v``."""
        return self._at_size_one(
            v,
            lambda u: self._of_parts(
                lambda tape, params: tape.gauss_newton_products(_in_dtypes_of(params, u))
            ),
        )

    def fisher_products(self, v: Params) -> Params:
        """Return the Fisher matrix times ``v``."""
        return self._at_size_one(
            v,
            lambda u: self._of_parts(lambda tape, params: fisher_products(tape, _in_dtypes_of(params, u))),
        )

    def diagonal(self, request: Diagonal) -> Params:
        """Return an estimate of a diagonal."""
        if request.matrix == "gauss_newton":
            return self._of_parts(lambda tape, _: tape.diagonal(request))
        total = self._zeros()
        for _ in range(request.samples):
            # One probe for all losses, so that micro-batches have the estimate of the whole batch.
            probe = {
                key: drawn_like(zero, request.distribution, self._generators(zero.device))
                for key, zero in total.items()
            }
            product = self._own_products(probe)
            total = {key: total[key] + probe[key] * product[key] / request.samples for key in total}
        return self._averaged(total)  # not the products, since the seeds of processes may differ

    def _zeros(self) -> Params:
        return {key: torch.zeros_like(widened(p)) for key, p in self._params.items()}

    def _of_parts(self, result: Callable[[TapeCurvature, Params], Params]) -> Params:
        """Sum the results for each loss of known form, in the parameters that it depends on."""
        return self._averaged(self._added(result(tape, params) for params, tape in self._tapes_of_parts))

    @functools.cached_property
    def _tapes_of_parts(self) -> list[tuple[Params, TapeCurvature]]:
        """The curvature of each loss of known form, in the parameters that it depends on."""
        found = []
        for one in self._curved:
            for part in one.parts:
                params = {key: p for key, p in self._params.items() if p in part.leaves and p in one.grads}
                grads = {key: one.grads[p] for key, p in params.items()}
                if params:
                    tape = TapeCurvature(params, grads, losses=[part.loss], generators=self._generators)
                    found.append((params, tape))
        return found

    def _added(self, parts: Iterable[Params]) -> Params:
        total: dict[str, Tensor] = {}
        for products in parts:
            for key, product in products.items():
                product = widened(product)
                total[key] = total[key] + product if key in total else product
        return {
            key: total[key] if key in total else torch.zeros_like(widened(p))
            for key, p in self._params.items()
        }

    def _averaged(self, own: Params) -> Params:
        """Return the mean over processes of what the losses of this one add up to, without their scale."""
        if self._inverse_scale != 1:
            own = {key: self._inverse_scale * values for key, values in own.items()}
        found = dict(zip(own, self._curved_mean.of(list(own.values())), strict=True))
        self._sums += [values.detach().sum() for values in found.values()]
        return found

    def _zero(self) -> Tensor:
        return widened(next(iter(self._params.values()))).new_zeros(())


def _in_dtypes_of(params: Params, v: Params) -> Params:
    return {key: v[key].to(p.dtype) for key, p in params.items()}


class ClosureObjective(GraphCurvature):
    """A :class:`GraphCurvature` with the loss at other parameters, by calling the closure again.

    Args:
        params: Parameters by name.
        passes: The losses.
        curved: Those whose curvature is taken, if others.
        closure: Computes them, and calls ``backward``, which does nothing here.
        every: All parameters of the optimizer, and what else has gradients of the losses; ``.grad`` is left alone.
        random: The states of random numbers that the closure began with, so that dropout is that of the step.
        buffers: Of the modules that it calls, which move with its first call alone.
        mean: Over processes, of losses that each has of its own.
        curved_mean: That of ``curved``.
        generators: Where the random numbers of estimates come from.
    """

    def __init__(
        self,
        params: Params,
        passes: Sequence[BackwardPass],
        curved: Sequence[BackwardPass] | None,
        closure: Callable[[], object],
        every: Sequence[Tensor],
        random: RandomState,
        buffers: ModuleBuffers,
        *,
        mean: Mean = _ALONE,
        curved_mean: Mean = _ALONE,
        generators: Generators = torchs_own,
    ) -> None:
        super().__init__(params, passes, curved, mean=mean, curved_mean=curved_mean, generators=generators)
        self._closure = closure
        self._every = every
        self._random = random
        self._buffers = buffers

    def evaluate(self, params: Params) -> Tensor:
        """Return the loss at other parameters."""
        return self._evaluated(params, with_gradient=False)[0]

    def gradient(self, params: Params) -> tuple[Tensor, Params]:
        """Return the loss and its gradient at other parameters."""
        return self._evaluated(params, with_gradient=True)

    def called(self, params: Params) -> tuple[Tensor, Params]:
        """Return the loss that the closure returns at other parameters, and the gradients that it leaves there.

        Both are those of this process alone.
        """
        with self._elsewhere(params):
            value = cast(Tensor, self._closure())
            found = {key: self._params[key].grad for key in params}
        grads = {key: torch.zeros_like(params[key]) if g is None else widened(g) for key, g in found.items()}
        return widened(value.detach().reshape(())), grads

    @contextlib.contextmanager
    def _elsewhere(self, params: Params) -> Generator[None]:
        """Substitute other parameters for a call of the closure, and restore buffers, ``.grad`` and generators."""
        with (
            self._random.restored(),
            self._buffers.kept(),
            without_gradients(self._every),
            _at(self._params, params),
            torch.enable_grad(),
        ):
            yield

    def _evaluated(self, params: Params, *, with_gradient: bool) -> tuple[Tensor, Params]:
        values: list[Tensor] = []
        grads = {key: torch.zeros_like(p) for key, p in params.items()}

        def backward(
            loss: Tensor, gradient: Tensor | None = None, retain_graph=None, create_graph=False, inputs=None
        ) -> None:
            values.append(widened(scalar_of(loss, gradient)).detach())
            if not with_gradient:
                return
            leaves = [self._params[key] for key in grads]
            found = torch.autograd.grad(loss, leaves, gradient, retain_graph=retain_graph, allow_unused=True)
            for key, g in zip(grads, found, strict=True):
                if g is not None:
                    grads[key] = grads[key] + widened(g)

        with self._elsewhere(params), LossRecorder(backward, note_losses=False):
            self._closure()
        if self._passes and not values:
            raise RuntimeError(
                "opt.step(closure): the closure has called loss.backward() at its first call, and not at a later. "
                "What it is called on is the loss, also at other parameters: call it every time."
            )
        total = torch.stack(values).sum() if values else self._zero()
        total, *found = self._mean.of([total, *(grads.values() if with_gradient else ())])
        return total, dict(zip(grads, found, strict=True)) if with_gradient else grads


_CALLS_HOOKS_TWICE = "Using `torch.compile\\(module\\)` when there are global hooks on modules"


def _ignore_hooks_of_compiled_modules() -> None:
    """Silence the warning that a compiled module calls hooks on all modules twice, which changes nothing here."""
    # Not by catch_warnings at each step, which makes Python forget what it has warned of once.
    if not any(getattr(f[1], "pattern", f[1]) == _CALLS_HOOKS_TWICE for f in warnings.filters):
        warnings.filterwarnings("ignore", _CALLS_HOOKS_TWICE)


class ModuleBuffers:
    """The buffers of the modules that a closure calls, such as the running statistics of BatchNorm."""

    def __init__(self) -> None:
        self._modules: dict[int, nn.Module] = {}
        self._tensors: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def noticed(self) -> Generator[None]:
        """Note the modules that are called meanwhile, with their parts."""
        _ignore_hooks_of_compiled_modules()
        handle = register_module_forward_pre_hook(lambda module, _: self._notice(module))
        try:
            yield
        finally:
            handle.remove()

    def _notice(self, called: nn.Module) -> None:
        if id(called) in self._modules:
            return
        for module in called.modules():
            self._modules[id(module)] = module
            # Those of functional_call are not the modules' own later on.
            self._tensors |= {id(buffer): buffer for buffer in module._buffers.values() if buffer is not None}

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """Undo what happens to the buffers meanwhile, whether they are written in place or set anew."""
        modules = self._modules.values()
        bound = [(module._buffers, dict(module._buffers)) for module in modules if module._buffers]
        own = {id(b): b for _, buffers in bound for b in buffers.values() if b is not None}
        kept = [(buffer, buffer.data) for buffer in (self._tensors | own).values()]
        for buffer, data in kept:
            buffer.data = data.clone()
        try:
            yield
        finally:
            for buffer, data in kept:
                buffer.data = data
            for buffers, before in bound:
                if any(buffers[name] is not buffer for name, buffer in before.items()):
                    buffers.update(before)


def scalar_of(loss: Tensor, gradient: Tensor | None) -> Tensor:
    """Return the number that ``loss.backward(gradient)`` differentiates."""
    return loss.reshape(()) if gradient is None else (loss * gradient).sum()


@contextlib.contextmanager
def _at(params: Params, values: Mapping[str, Tensor]) -> Generator[None]:
    """Give parameters other values, within a ``with`` block.

    Their storages are replaced, not written into: graphs of the loss hold the parameters, whose versions must not
    change.
    """
    kept: dict[str, Any] = {key: p.data for key, p in params.items()}
    try:
        for key, p in params.items():
            p.data = values[key].to(p.dtype)
        yield
    finally:
        for key, p in params.items():
            p.data = kept[key]


@contextlib.contextmanager
def without_gradients(params: Sequence[Tensor]) -> Generator[None]:
    """Set ``.grad`` to None within a ``with`` block, and restore it afterwards."""
    kept = [p.grad for p in params]
    try:
        for p in params:
            p.grad = None
        yield
    finally:
        for p, g in zip(params, kept, strict=True):
            p.grad = g
