"""Groups of parameters with one block each, and the sums over examples from which the blocks are computed."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from metagrad.core import _torch
from metagrad.core.checks import refuse
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import widened
from metagrad.curvature.kronecker.factors import Eigenblock, Factors, scaling_of
from metagrad.curvature.kronecker.layers import KNOWN, input_rows, output_rows, without_base
from metagrad.curvature.operators.batches import Batch
from metagrad.curvature.operators.problem import ModelEvaluation, ModelProblem
from metagrad.distributed.exchange import sums_over

Sharing = Literal["expand", "reduce"]
Other = Literal["error", "diagonal", "identity"]

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _torch.BatchNorm, _torch.InstanceNorm)
_LARGEST_FULL = 1024  # maximum number of parameters of a norm layer with a full block


class LayerGroup:
    """The parameters of a layer, or of several that share them. Their block is a Kronecker product."""

    def __init__(self, names: tuple[str, ...], layers: list[Any], sharing: Sharing) -> None:
        self.names, self.layers = names, layers
        self.calls: list[tuple[Any, Tensor, int, Any]] = []
        self.block: Any = None
        self._table_size: int = getattr(layers[0], "num_embeddings", 0)
        self._averages = sharing == "reduce" and not self._table_size
        self.sums: dict[str, Any] = defaultdict(float)

    def note(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        """Record the input of a call, and the node of its output in the graph. This is a forward hook."""
        output = without_base(output)
        if output.requires_grad:
            inputs = args[0] if args else kwargs["input"]
            self.calls.append((layer, inputs.detach(), inputs._version, get_gradient_edge(output)))
        return output

    def like(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor like the sums ``name``, which a rank without data that count does not have."""
        weight = self.layers[0].weight
        rows, columns = len(weight), weight[0].numel() + len(self.names) - 1
        shapes: dict[str, list[int]] = {"rows": [], "squares": [rows, columns]}
        if self._table_size:
            shapes |= {"inputs": [rows], "outputs": [columns, columns]}
        else:
            shapes |= {"inputs": [columns, columns], "outputs": [rows, rows]}
        exact = torch.float64 if len(shapes[name]) < 2 else dtype  # counts
        return torch.empty(shapes[name], dtype=exact, device=weight.device)

    def input_parts(self) -> list[Tensor]:
        """Return the inputs of each call as rows or indices, ``[examples, positions, size]``."""
        return [input_rows(layer, value, has_bias=len(self.names) > 1) for layer, value, *_ in self.calls]

    def check_gradient(self, call: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        """Raise ``ValueError`` unless inputs and gradients of outputs give the gradient of the parameters."""
        whole = torch.cat([g.reshape(len(g), -1) for g in expected], 1)
        total, scale = torch.zeros_like(whole), torch.zeros_like(whole[0, 0])
        for (layer, *_), part, gradient in zip(self.calls, self.input_parts(), found, strict=True):
            a, g = part.flatten(0, 1).to(whole), output_rows(layer, gradient).flatten(0, 1).to(whole)
            if self._table_size:
                total.index_add_(0, part.flatten(), g)
            else:
                total += g.mT @ a
            scale += a.norm() * g.norm()
        if (padding := getattr(self.layers[0], "padding_idx", None)) is not None:
            total[padding] = 0
        eps = max(torch.finfo(t.dtype).eps for t in (whole, *found))
        if bool((total - whole).norm() > 3 * eps**0.5 * scale):  # NaN is found later
            raise ValueError(
                f"{call}: the gradient of {self.names[0]!r} is not the sum over calls of its layer of gradients of "
                "outputs times inputs. The parameter is used outside of its layer, or a hook or another forward "
                "changes what the layer computes. Leave its parameters out of params."
            )

    def inputs(self, evaluation: ModelEvaluation) -> Tensor:
        """Return the inputs of a batch as rows or indices. The first pass adds them to their factor."""
        rows = self._by_example(evaluation, self.input_parts())
        rows = rows.mean(1, keepdim=True) if self._averages else rows
        if self.block is None:
            own, size = _counted(evaluation, rows), self._table_size
            self.sums["rows"] += len(own)
            self.sums["inputs"] += own[:, 0].bincount(None, size) if size else own.mT @ own
        return rows

    def add(self, evaluation: ModelEvaluation, inputs: Tensor, found: Sequence[Tensor]) -> None:
        """Add gradients of the outputs: to their factor, or to the squares in the eigenbasis in a second pass."""
        parts = [output_rows(layer, g) for (layer, *_), g in zip(self.calls, found, strict=True)]
        rows = self._by_example(evaluation, parts)
        rows = rows.sum(1, keepdim=True) if self._averages else rows
        if self.block is None:
            self.sums["outputs"] += rows.flatten(0, 1).mT @ rows.flatten(0, 1)
        elif self._table_size:
            self.sums["squares"] += _table_squares(inputs[..., 0], rows @ self.block.right, self._table_size)
        else:
            basis = Factors(self.block.right, self.block.left)
            self.sums["squares"] += scaling_of(inputs, rows, basis)

    def _by_example(self, evaluation: ModelEvaluation, parts: Sequence[Tensor]) -> Tensor:
        """Return the rows of all calls, grouped by example.

        The first dimension counts examples, or data of the loss.
        """
        size, known, sizes = evaluation.num_examples, evaluation.known, [len(part) for part in parts]
        if not {size, known.num_data if known else size}.issuperset(sizes):
            self.refuse_order(evaluation, f"sizes {sizes}")
        return widened(torch.cat([part.unflatten(0, (size, -1)).flatten(1, 2) for part in parts], 1))

    def refuse_order(self, evaluation: ModelEvaluation, got: str) -> NoReturn:
        """Raise ``ValueError`` because the examples are not in the first dimension."""
        raise ValueError(
            f"{evaluation.problem.call}: the first dimension of the input of {self.names[0]!r} must be the "
            f"{evaluation.num_examples} examples, got {got}. Pass sequences as [examples, positions, ...], and "
            "positions as torch.arange(T).expand(N, T)."
        )

    def decompose(self, total: float | Tensor) -> Eigenblock:
        """Return the Kronecker product of the factors. In a second pass, the squares replace its eigenvalues."""
        if self.block is None:
            outputs = self.sums["outputs"] / total
            factors = outputs, self.sums["inputs"].to(outputs.dtype) / self.sums["rows"]
            self.block = Eigenblock.of_factors(self.names, *factors[:: -1 if self._table_size else 1])
        else:
            self.block = self.block._replace(eigenvalues=self.sums["squares"] / total, spectra=None)
        if (padding := getattr(self.layers[0], "padding_idx", None)) is not None:  # has no gradient
            self.block.eigenvalues[padding] = 0
        return self.block


class Groups:
    """The parameters of a model, by the kind of their block.

    Raises:
        ValueError: A module normalizes by its batch, or a parameter has no known block and ``other="error"``.
    """

    def __init__(self, problem: ModelProblem, model: nn.Module, other: Other, sharing: Sharing) -> None:
        refuse_batch_norms(problem.call, model)
        self.problem = problem
        self.layers: list[LayerGroup] = []
        self._is_checked, self._is_first = False, True
        # Whether the full matrix is estimated, or only its diagonal.
        self.rows: dict[tuple[str, ...], bool] = {}
        self._sums: dict[tuple[str, ...], Any] = defaultdict(float)
        own = dict(model.named_parameters(remove_duplicate=False))
        names, members = {id(own[name]): name for name in problem.params}, defaultdict[Any, list[Any]](list)
        for _, module in _torch.named_modules(model):
            members[tuple(names[id(p)] for p in module.parameters(recurse=False) if id(p) in names)].append(
                module
            )
        members.pop((), None)
        owners, rest = Counter(name for group in members for name in group), dict[str, None]()
        for group, modules in members.items():
            kinds = {(type(module), getattr(module, "padding_idx", None)) for module in modules}
            is_alone = all(owners[name] == 1 for name in group) and len(kinds) == 1
            if is_alone and all(_is_known(module, [own[name] for name in group]) for module in modules):
                self.layers.append(LayerGroup(group, modules, sharing))
            elif not is_alone or not isinstance(modules[0], _NORMS):
                rest.update(dict.fromkeys(group))
            else:
                is_small = self._size(group) <= _LARGEST_FULL
                self.rows.update({group: True} if is_small else {(name,): False for name in group})
        if other == "error" and rest:
            call = f'{problem.call}: without other="diagonal" or "identity"'
            refuse(
                call, "parameters of Linear, Conv1d to Conv3d of one group, Embedding or norms", list(rest)
            )
        self.rows.update({(name,): False for name in rest if other != "identity"})
        self._identities = [(name,) for name in rest if other == "identity"]

    def _size(self, names: Iterable[str]) -> int:
        return sum(self.problem.space.block(name).size for name in names)

    def observe(self, batch: Batch) -> ModelEvaluation:
        """Evaluate a batch, and record the calls of layers.

        Raises:
            ValueError: A parameter is used outside of the calls of its layer.
        """
        with ExitStack() as hooks:
            for group in self.layers:
                group.calls.clear()
                for layer in group.layers:
                    handle = layer.register_forward_hook(group.note, prepend=True, with_kwargs=True)
                    hooks.callback(handle.remove)
            evaluation = self.problem.evaluate(batch)
        self._check_reached(evaluation)
        if evaluation.num_examples and not self._is_checked:
            self._is_checked = evaluation.num_examples > 1
            self._check_gradients(evaluation)
            self._check_order(evaluation)
        return evaluation

    def _check_gradients(self, evaluation: ModelEvaluation) -> None:
        """Raise ``ValueError`` if the gradient of a parameter does not come from the calls of its layer."""
        leaves = dict(zip(self.problem.params, evaluation.recorded.inputs, strict=True))
        inputs: Any = [edge for group in self.layers for *_, edge in group.calls]
        inputs += [leaves[name] for group in self.layers for name in group.names]
        cotangents = [z.detach().cos() for z in evaluation.outputs]
        found: Any = inputs and torch.autograd.grad(evaluation.outputs, inputs, cotangents, retain_graph=True)
        own = iter(found)
        pulled = [list(islice(own, len(group.calls))) for group in self.layers]
        for group, gradients in zip(self.layers, pulled, strict=True):
            group.check_gradient(self.problem.call, gradients, list(islice(own, len(group.names))))

    def _check_reached(self, evaluation: ModelEvaluation) -> None:
        """Raise ``ValueError`` if the graph of the outputs lacks a call of a layer, or an input has changed since."""
        nodes = set(graph_nodes(evaluation.outputs))
        for group in self.layers:
            if any(value._version != version for _, value, version, _ in group.calls):
                call = f"{self.problem.call}: the input of {group.names[0]!r}"
                refuse(call, "an input that its layer saved unchanged", "a change in place after the call")
            if any(edge.node not in nodes for *_, edge in group.calls):
                refuse(
                    f"{self.problem.call}: {group.names[0]!r}",
                    "a layer that the outputs depend on, outside of metagrad.checkpoint. Leave its parameters out of "
                    "params, or call torch.utils.checkpoint",
                    "a call that is not in the graph of the outputs",
                )

    def _check_order(self, evaluation: ModelEvaluation) -> None:
        """Raise ``ValueError`` if outputs of the last example depend on other rows of a sequence or of a table."""
        size, outputs = evaluation.num_examples, evaluation.outputs
        calls = [
            (group, edge)
            for group in self.layers
            for layer, value, _, edge in group.calls
            if isinstance(layer, nn.Embedding)
            or (isinstance(layer, nn.Linear) and value.ndim > 2)
            or len(value) > size
        ]
        if not calls or size < 2 or any(z.numel() % size for z in outputs):
            return
        last = torch.arange(size, device=outputs[0].device) == size - 1
        cotangents = [
            (z.detach().reshape(size, -1).cos() * last.unsqueeze(1)).reshape(z.shape) for z in outputs
        ]
        found: Any = torch.autograd.grad(
            evaluation.outputs, [edge for _, edge in calls], cotangents, retain_graph=True
        )
        for (group, _), g in zip(calls, found, strict=True):
            if len(g) % size == 0 and bool(g.reshape(size, -1)[:-1].any()):
                group.refuse_order(evaluation, "another dimension")

    def add(self, evaluation: ModelEvaluation, columns: Iterable[Sequence[Tensor]]) -> None:
        """Add a batch, given cotangents of the outputs. In a second pass only the eigenvalues of layers change."""
        inputs = [group.inputs(evaluation) for group in self.layers]
        edges = [edge for group in self.layers for *_, edge in group.calls]
        sizes = [self._size(names) for names in self.rows]
        names = [name for group in self.rows for name in group] if self._is_first else []
        for column in columns:
            pulled: Any = edges and torch.autograd.grad(evaluation.outputs, edges, column, retain_graph=True)
            found = iter(pulled)
            for group, own in zip(self.layers, inputs, strict=True):
                group.add(evaluation, own, list(islice(found, len(group.calls))))
            for rows in evaluation.example_rows(column, names) if names else ():
                for (key, is_full), own in zip(self.rows.items(), rows.split(sizes, 1), strict=True):
                    self._sums[key] += own.mT @ own if is_full else own.square().sum(0)

    def over_ranks(self, total: float | Tensor, group: dist.ProcessGroup) -> Tensor:
        """Add the sums of all ranks after a pass, and return the sum of their totals."""
        names = ("rows", "inputs", "outputs") if self._is_first else ("squares",)
        wide, device = torch.promote_types(self.problem.space.dtype, torch.float32), self.problem.space.device
        places: list[tuple[Any, Any]] = [(layer.sums, name) for layer in self.layers for name in names]
        like = [layer.like(name, wide) for layer in self.layers for name in names]
        for key, is_full in self.rows.items() if self._is_first else ():
            places.append((self._sums, key))
            like.append(torch.empty([self._size(key)] * (1 + is_full), dtype=wide, device=device))
        whole = torch.tensor(float(total), dtype=torch.float64, device=device)
        given = [
            torch.as_tensor(o[k]).to(x) if k in o else None for (o, k), x in zip(places, like, strict=True)
        ]
        whole, *found = sums_over(group, [whole, *given], [whole, *like])
        for (own, key), value in zip(places, found, strict=True):
            own[key] = value
        return whole

    def blocks(self, total: float | Tensor) -> list[Eigenblock]:
        """Return the blocks after a pass. Raise ``ValueError`` if no data counts, or a sum is NaN or Inf."""
        if not total:
            raise ValueError(
                f"{self.problem.call}: no batch has data that count, so that there is no mean over them."
            )
        for names, sums in [*((group.names, group.sums) for group in self.layers), (("params",), self._sums)]:
            if not all(bool(torch.as_tensor(value).isfinite().all()) for value in sums.values()):
                refuse(f"{self.problem.call}: {names[0]!r}", "finite inputs and gradients", "NaN or Inf")
        self._is_first = False
        sums = {names: self._sums[names] / total for names in self.rows}
        one = torch.ones((), dtype=self.problem.space.dtype, device=self.problem.space.device)
        sums.update({names: one.expand(self._size(names)) for names in self._identities})
        own = [Eigenblock.of_factors(names, matrix) for names, matrix in sums.items()]
        return [group.decompose(total) for group in self.layers] + own


def refuse_batch_norms(call: str, model: object) -> None:
    """Raise ``ValueError`` if a module normalizes by its batch, so that an example has no gradient of its own."""
    for path, module in _torch.named_modules(model) if isinstance(model, nn.Module) else ():
        if isinstance(module, _torch.BatchNorm) and (module.training or module.running_mean is None):
            refuse(f"{call}: {path!r} normalizes by the batch", "running statistics and model.eval()", module)


def _is_known(layer: Any, params: list[Any]) -> bool:
    """Return whether the block of a layer is a Kronecker product. A subclass may compute anything."""
    weight, *rest = params
    if type(layer) not in (*KNOWN, nn.Embedding) or weight is not layer.weight:
        return False  # such as a bias without its weight, or a weight that is pruned
    if any(p is not getattr(layer, "bias", None) for p in rest):
        return False
    options = {"groups": 1, "scale_grad_by_freq": False, "max_norm": None}
    return all(getattr(layer, name, value) == value for name, value in options.items())


def _counted(evaluation: ModelEvaluation, rows: Tensor) -> Tensor:
    """Return the rows ``[positions, size]`` of positions or examples that count in the loss."""
    known = evaluation.known
    if known is not None and not bool((known.scale != 0).all()):
        # A weight for each output has no dimension of data.
        scale = known.scale + known.output.new_zeros(known.output.shape[:1] + (1,) * (known.output.ndim - 1))
        for shape in (rows.shape[:2], rows.shape[:1]):
            count = math.prod(shape)
            is_own = len(shape) == 1 or count in (scale.numel(), known.num_data) or scale.shape[:2] == shape
            if is_own and scale.numel() % count == 0:
                return rows[(scale != 0).reshape(*shape, -1).any(-1)].reshape(-1, rows.shape[2])
    return rows.flatten(0, 1)


def _table_squares(indices: Tensor, gradients: Tensor, num_embeddings: int) -> Tensor:
    """Return the sums over examples of the squared gradient of each row of a table."""
    places = torch.arange(len(indices), device=indices.device).unsqueeze(1) * num_embeddings + indices
    distinct, inverse = places.flatten().unique(return_inverse=True)
    size = gradients.shape[-1]
    sums = gradients.new_zeros(len(distinct), size).index_add_(0, inverse, gradients.flatten(0, 1))
    return gradients.new_zeros(num_embeddings, size).index_add_(0, distinct % num_embeddings, sums.square())
