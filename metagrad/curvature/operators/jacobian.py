"""Products with the Jacobian of a model's outputs and with its transpose, on one graph."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator, Iterable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from metagrad.autograd.checks.missing_derivatives import MissingDerivative, named_if_missing, refuse_missing
from metagrad.autograd.derivatives.graph_vjp import TransposedProduct, transposed_product
from metagrad.autograd.derivatives.point import Point
from metagrad.autograd.derivatives.quick.attention import unfused_attention
from metagrad.autograd.derivatives.variables import batched_grad, end_nodes, grouped, inputs_of, pull_back
from metagrad.core.capture import AutocastState, forward_mode, restored
from metagrad.core.checks import warn
from metagrad.core.modules import ModuleState, modules_of
from metagrad.curvature.operators.problem import ModelEvaluation

Mode = Literal["auto", "reverse", "forward"]


class JacobianMode:
    """How products with a Jacobian are computed; shared by the batches of an operator, so that it falls back once.

    Args:
        call: How errors name the caller.
        mode: ``"auto"`` is ``"reverse"``, and ``"forward"`` where a derivative is missing.
    """

    def __init__(self, call: str, mode: Mode) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"{call}: mode must be one of {', '.join(get_args(Mode))}, got {mode!r}.")
        self.call = call
        self._left = ["reverse", "forward"] if mode == "auto" else [mode]
        self._reason: MissingDerivative | None = None

    @property
    def is_forward(self) -> bool:
        """Whether products are in forward mode now."""
        return self._left[0] == "forward"

    def reject(self, error: MissingDerivative) -> None:
        """Switch to the other mode, with a warning; raise if there is none."""
        if len(self._left) == 1:
            raise error if self._reason is None else MissingDerivative(f"{self._reason}\n{error}")
        warn(f'{error}\nGoing on with mode="forward", which runs the model for every product.')
        del self._left[0]
        self._reason = error


class Jacobian:
    r"""The Jacobian :math:`J` of outputs :math:`z(\theta)`, as a linear map: one graph for any number of products.

    .. math:: J^\top u = \nabla_\theta \langle z, u \rangle, \qquad J v = \nabla_w \langle J^\top w, v \rangle

    :math:`J^\top w` is linear in :math:`w`, so its gradient is the same at every :math:`w`. The second graph is that
    of a backward pass; forward mode keeps none, and runs the model again.

    Args:
        evaluation: The model on a batch, with its graph.
        mode: How products are computed; it changes when a derivative is missing.

    References:
        Townsend, "A new trick for calculating Jacobian vector products", 2017.
    """

    def __init__(self, evaluation: ModelEvaluation, mode: JacobianMode) -> None:
        self.outputs: list[Tensor] = evaluation.outputs
        self.variables = evaluation.variables
        self.mode = mode
        self.create_graph: bool = evaluation.problem.create_graph
        self.chosen: Sequence[int] = range(len(self.variables))
        self._evaluation = evaluation
        self._autocast = AutocastState()
        problem = evaluation.problem
        self._modules = ModuleState([*modules_of(problem.model), *modules_of(problem.loss_fn)])
        params = {repr(name): v.leaf for name, v in zip(problem.params, self.variables, strict=True)}
        self._point = Point(mode.call, params, evaluation.batch, self._modules.buffers())
        self._transposed: TransposedProduct | None = None
        if self.create_graph:
            # In forward mode as well: the derivative of layer_norm's product with a tangent is wrong (torch 2.13).
            self._refuse_missing(order=3)

    def block(self, chosen: Sequence[int]) -> Jacobian:
        """Return the columns of some variables, by number; they share the graphs."""
        if not self.mode.is_forward:
            try:
                self._record()
            except MissingDerivative as error:
                self.mode.reject(error)
        part = copy.copy(self)
        part.chosen = chosen
        return part

    def products(self, vectors: Sequence[Tensor], together: bool) -> list[Tensor]:
        """Multiply stacks of coordinates ``[m, *shape]``, giving ``[m, *output.shape]`` for each output."""
        try:
            return self._forward(vectors) if self.mode.is_forward else self._reverse(vectors, together)
        except MissingDerivative as error:
            self.mode.reject(error)
        return self.products(vectors, together)

    def transposed_products(
        self, cotangents: Sequence[Tensor], together: bool, *, of: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Multiply stacks ``[m, *output.shape]``, giving ``[m, *shape]`` for each variable.

        Args:
            cotangents: For each output.
            together: Whether in one backward pass; else m is 1.
            of: Take the Jacobian of these tensors instead, which were computed from the outputs.
        """
        self._point.refuse_moved()
        return pull_back(
            self.outputs if of is None else of,
            [self.variables[i] for i in self.chosen],
            cotangents,
            count=len(cotangents[0]),
            together=together,
            create_graph=self.create_graph,
        )

    def _reverse(self, vectors: Sequence[Tensor], together: bool) -> list[Tensor]:
        self._point.refuse_moved()
        cotangents, products = self._record()
        with torch.set_grad_enabled(self.create_graph), named_if_missing(self.mode.call):
            parts = grouped(self.variables, products)
            gathered = zip(self.chosen, vectors, strict=True)
            found = batched_grad(
                [part for i in self.chosen for part in parts[i]],
                cotangents,
                [at for i, vector in gathered for at in self.variables[i].gather(vector)],
                together=together,
                create_graph=self.create_graph,
            )
        return filled(found, cotangents, len(vectors[0]))

    def _record(self) -> TransposedProduct:
        """Record the backward pass for cotangents that are variables, once."""
        if self._transposed is None:
            self._refuse_missing(order=2)
            self._transposed = transposed_product(self.outputs, inputs_of(self.variables))
        return self._transposed

    def _refuse_missing(self, order: int) -> None:
        behind = end_nodes(self.variables)
        for output in self.outputs:
            refuse_missing(self.mode.call, output, order=order, behind=behind)

    def _forward(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        tables = [v.name for v in self.variables if v.lookups is not None]
        if tables:
            raise MissingDerivative(
                f"{self.mode.call}: forward mode would need tangents as large as the tables {', '.join(tables)}. "
                'Take mode="reverse", or leave them out of params.'
            )
        with self._point.read_again():
            rows = [self._tangents([vector[i] for vector in vectors]) for i in range(len(vectors[0]))]
        return [torch.stack(parts) for parts in zip(*rows, strict=True)]

    def _tangents(self, tangents: list[Tensor]) -> list[Tensor]:
        leaves = [v.leaf if self.create_graph else v.leaf.detach() for v in self.variables]

        def outputs(*chosen: Tensor) -> list[Tensor]:
            moved = dict(zip(self.chosen, chosen, strict=True))
            return self._evaluation.rerun([moved.get(i, leaf) for i, leaf in enumerate(leaves)])

        try:
            with torch.set_grad_enabled(self.create_graph), self._surroundings():
                return torch.func.jvp(outputs, tuple(leaves[i] for i in self.chosen), tuple(tangents))[1]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise MissingDerivative(
                f'{self.mode.call}: mode="forward" does not run this model: {str(error).splitlines()[0]}'
            ) from error

    @contextlib.contextmanager
    def _surroundings(self) -> Generator[None, None, None]:
        """Draw the random numbers and cast as the graph did, with modules as they were."""
        states = self._evaluation.random, self._autocast, self._modules
        with restored(*states), unfused_attention, forward_mode():
            yield


def filled(found: Iterable[Tensor | None], like: Sequence[Tensor], count: int) -> list[Tensor]:
    """Put stacks of zeros where there is no derivative."""
    return [z.new_zeros(count, *z.shape) if f is None else f for f, z in zip(found, like, strict=True)]
