"""A model and a loss on a batch: the outputs that the loss is a function of, and the parameters they depend on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from metagrad.autograd.derivatives.grad import check_loss
from metagrad.autograd.derivatives.recorded import Recorded, checked_leaves, refuse_order, refuse_unused
from metagrad.core.checks import check_function, dtypes_explained
from metagrad.core.modules import called_on, check_substitutable, refuse_wrapped
from metagrad.core.reach import ReachableObjects
from metagrad.core.substitution import differentiable_run, own_buffers, replaced
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import (
    LossFn,
    Params,
    Tree,
    plain_dicts,
    tensors_in,
    tree_leaves,
    tree_map,
)
from metagrad.curvature.likelihoods import OutputLoss, evaluate, is_affine_in
from metagrad.curvature.operators.batches import num_data
from metagrad.curvature.operators.jacobian import Examples
from metagrad.curvature.operators.space import Parameters, ParameterSpace, values_of, with_values

Model: TypeAlias = "nn.Module | Callable[[Parameters, Tree], Tree]"
"""A module, called on x with substituted parameters, or a function, called as ``model(params, x)``."""

_CHUNK = 64 * 2**20  # bytes of the gradients of single examples


class ModelProblem:
    """A model, a loss and parameters, without data.

    Args:
        call: Name of the caller in errors.
        model: The model.
        loss_fn: The loss.
        params: The parameters by name.
        create_graph: Whether products will be differentiated.
        any_split: Accept a known loss of any function of the output, not only of affine functions. For the Fisher
            matrix, which does not depend on the split.
    """

    def __init__(
        self,
        call: str,
        model: Model,
        loss_fn: LossFn,
        params: Parameters,
        *,
        create_graph: bool = False,
        any_split: bool = False,
    ) -> None:
        self.call = call
        self.model: Model = check_function(call, "model", model)
        self.loss_fn: LossFn = check_function(call, "loss_fn", loss_fn)
        self.params = params
        self.space = ParameterSpace(params, call=call)
        self.create_graph = create_graph
        self.any_split = any_split
        refuse_wrapped(call, model)
        self._modules = ReachableObjects(model).modules
        if isinstance(model, nn.Module):
            check_substitutable(call, model.modules())
            own, given = ({k: values_of(p).shape for k, p in each.items()} for each in (_own(model), params))
            wrong = {name: list(shape) for name, shape in given.items() if own.get(name) != shape}
            if wrong:
                raise ValueError(
                    f"{call}: params must have names and shapes of the model's parameters, such as "
                    f"dict(model.named_parameters()), got {wrong}."
                )

    def evaluate(self, batch: Tree) -> ModelEvaluation:
        """Run model and loss on a batch ``(x, y)``.

        Raises:
            ValueError: The batch is not a pair. The loss has several elements, or does not depend on a parameter (the
                error names it) through the model's output.
        """
        x, y = self._pair(batch)
        with torch.enable_grad():
            leaves = self._leaves()
            explained = dtypes_explained(self.call, map(values_of, self.params.values()), x)
            with differentiable_run(self.call, self._modules), explained:
                output = self._call_model(leaves, x)
            loss, known = self._evaluated(output, y)
        named = self._checked(leaves, loss)
        if known is not None and not (self.any_split or is_affine_in(known.output, tensors_in(output))):
            known = None
        outputs = [known.output] if known is not None else self._differentiable(output)
        if self.create_graph:
            refuse_order(self.call, outputs, list(named.values()), 3)
        recorded = Recorded(self.call, outputs, named, create_graph=self.create_graph)
        return ModelEvaluation(self, batch, loss, output, outputs, known, recorded)

    def _evaluated(self, output: Tree, y: Tree) -> tuple[Tensor, OutputLoss | None]:
        try:
            return evaluate(self.loss_fn, output, y)
        except (IndexError, RuntimeError) as error:
            found = [f"{tuple(t.shape)} of {t.dtype}" for t in tensors_in([output, y])]
            raise ValueError(
                f"{self.call}: loss_fn(output, y) raised an error. The tensors of output and y are "
                f"{', '.join(found)}. Class labels must be int64, from 0 to the number of classes - 1. "
                f"The error was: {error}"
            ) from error

    def _pair(self, batch: Tree) -> tuple[Tree, Tree]:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
            raise ValueError(
                f"{self.call}: a batch must be a pair (x, y), for model(x) and loss_fn(output, y), got a "
                f"{type(batch).__name__}{size}. Pass a dataset as DataLoader(dataset, batch_size=...). Put several "
                "inputs into a tuple or dict x, which holds the arguments of the model."
            )
        return plain_dicts(tuple(batch))

    def _leaves(self) -> dict[str, Tensor]:
        """Return the tensors to differentiate with respect to.

        Parameters of the module itself are used as they are, so the module is called unchanged.
        """
        own = _own(self.model) if isinstance(self.model, nn.Module) else {}
        found = {}
        for name, param in self.params.items():
            values = values_of(param)
            if param is own.get(name) and values.requires_grad:
                found[name] = values
            elif self.create_graph and values.requires_grad:
                found[name] = values.view_as(values)
            else:
                found[name] = values.detach().requires_grad_()
        return found

    def _call_model(self, leaves: Mapping[str, Tensor], x: Tree) -> Tree:
        """Run the model with substituted parameters."""
        if not isinstance(self.model, nn.Module):
            return self.model(with_values(self.params, leaves), x)
        own = _own(self.model)
        values = {id(own[name]): leaf for name, leaf in leaves.items() if leaf is not own[name]}
        with replaced(self.model, values):
            return _call_module(self.model, x)

    def _checked(self, leaves: dict[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
        """Return the leaves by their names in errors."""
        check_loss(self.call, loss)
        named = checked_leaves(self.call, leaves)
        seen = set(graph_nodes([loss]))
        refuse_unused(self.call, {name: get_gradient_edge(p).node in seen for name, p in named.items()})
        return named

    def _differentiable(self, output: Tree) -> list[Tensor]:
        found = [leaf for leaf in tree_leaves(output) if _is_on_tape(leaf)]
        if not found:
            raise ValueError(
                f"{self.call}: the output of the model, {type(output).__name__}, has no tensor that depends on "
                "params. The loss must depend on them through the model's output."
            )
        return found


@dataclass(frozen=True, eq=False)
class ModelEvaluation:
    """A problem on one batch, with its graph.

    Attributes:
        problem: The problem.
        batch: ``(x, y)``.
        loss: The loss, with its graph.
        output: The output of the model.
        outputs: The tensors whose Jacobian is computed: the argument of the loss if metagrad recognizes the loss,
            otherwise all tensors in ``output`` that depend on the parameters.
        known: The loss as a function of the single output, if it is recognized.
        recorded: The outputs with their graph.
    """

    problem: ModelProblem
    batch: Tree
    loss: Tensor
    output: Tree
    outputs: list[Tensor]
    known: OutputLoss | None
    recorded: Recorded

    def output_of(self, outputs: Sequence[Tensor]) -> Tree:
        """Return the output, with its differentiable tensors replaced by the given tensors."""
        rest = iter(outputs)
        return tree_map(lambda leaf: next(rest) if _is_on_tape(leaf) else leaf, self.output)

    @property
    def num_examples(self) -> int:
        """Number of examples: the first dimension of the input, or of the known output if that has fewer."""
        count, known = num_data(self.problem.call, self.batch), self.known
        return known.num_data if known is not None and count and known.num_data % count else count

    def loss_gradients(self) -> list[Tensor]:
        """Return the gradient of the loss with respect to each of the ``outputs``."""
        return list(torch.autograd.grad(self.loss, self.outputs, retain_graph=True, materialize_grads=True))

    def example_rows(self, cotangents: Sequence[Tensor], names: Sequence[str]) -> Iterator[Tensor]:
        """Multiply the transposed Jacobian of each example by its part of the cotangents of ``outputs``.

        Every tensor of the input and of the output counts examples in its first dimension. The model is called with
        single examples, vectorized.

        Args:
            cotangents: A cotangent for each of the ``outputs``.
            names: Names of the parameters.

        Yields:
            ``[some examples, n]``, the coordinates of the parameters. The examples come in their order.
        """
        leaves = tree_leaves(self.output)
        places = [i for i, leaf in enumerate(leaves) if _is_on_tape(leaf)]
        own = [leaves[i] for i in places]
        parts = torch.autograd.grad(self.outputs, own, cotangents, retain_graph=True, materialize_grads=True)

        def value(params: Params, x: Tree, *parts: Tensor) -> Tensor:
            one = tree_map(lambda leaf: leaf.unsqueeze(0), x)
            with own_buffers(module for module in self.problem._modules if module.training):
                found = tree_leaves(self.problem._call_model(params, one))
            return torch.stack([(found[i] * part).sum() for i, part in zip(places, parts, strict=True)]).sum()

        params = {name: values_of(p).detach() for name, p in self.problem.params.items()}
        chosen = {name: params[name] for name in names}
        size = max(1, _CHUNK // sum(p.numel() * p.element_size() for p in chosen.values()))
        for start in range(0, len(parts[0]), size):
            some = tree_map(lambda leaf: leaf[start : start + size], (self.batch[0], *parts))  # noqa: B023
            examples = Examples(self.problem.call, value, some)
            yield examples.rows(chosen, examples.count, _CHUNK, params)


def _call_module(model: nn.Module, x: Tree) -> Tree:
    """Call a module on the arguments in a dict, tuple or list, unless its ``forward`` takes the container."""
    try:
        called_on(inspect.signature(model.forward).bind, x)
    except TypeError:
        return model(x)
    return called_on(model, x)


def _own(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _is_on_tape(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
