"""What MAML compiles: one inner step and the query loss, or a whole meta-batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from metagrad.autograd.compile.compiled import (
    Checked,
    CompileOptions,
    FreeTensorError,
    UncompilableError,
    check_compilable,
    operand,
)
from metagrad.autograd.compile.value_and_grad import ValueAndGrad
from metagrad.autograd.recompute.checkpoint import Look
from metagrad.autograd.unrolling.compiled import CompiledStep, are_few, are_small
from metagrad.core import _torch
from metagrad.core._torch import named_modules
from metagrad.core.structured import Nested, Structured
from metagrad.core.tree import HOLE, Structure, dissect, tensors_in, tree_flatten, tree_leaves, tree_map
from metagrad.meta.objective.tasks import Tasks
from metagrad.meta.objective.vmap import is_plain
from metagrad.optim.rules import Params, Rule
from metagrad.optim.walk import is_constant
from metagrad.sparse.tables.embedding import over

T = TypeVar("T")


class FlatFunction(NamedTuple):
    """A function of trees as one of a list of tensors; a named tuple, which Dynamo's guards match by value.

    Attributes:
        function: Trees to losses, predictions and the like.
        structure: Where the tensors stand in the trees.
    """

    function: Callable[..., Sequence[Nested]]
    structure: Structure

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what the function does, which must be tensors."""
        return checked_tensors(self.function(*self.structure.fill(tensors)))


def checked_tensors(results: Sequence[Nested | None]) -> list[Tensor]:
    """Leave out results that are None; refuse those that are not single tensors."""
    for result in results:
        if isinstance(result, Structured):
            kind = type(result.restored()).__name__
            raise UncompilableError(
                f"the model returns a {kind} and not a tensor (wrap one that returns the logits)"
            )
    return [result for result in results if result is not None]  # type: ignore[arg-type]


def _task_by_task(grads: Sequence[Tensor], given: Mapping[int, Tensor]) -> Sequence[Tensor] | None:
    """Weight gradients whose elements each depend on one task: the only task, or the task of the row."""
    if list(given) != [0]:
        return None
    return [gradient * over(given[0], gradient) for gradient in grads]


_MOST_STRUCTURES = 64


class _KeptRule(NamedTuple):
    """A rule with every number as a tensor.

    Attributes:
        rule: The rule that it was made of.
        form: The number of steps, dtype and device that it was made for.
        made: The rule.
        tensors: Its tensors.
    """

    rule: Rule
    form: tuple[Any, ...]
    made: Rule
    tensors: list[Tensor]


def _form_of(value: object, tensors: list[Tensor], rule: _KeptRule | None) -> Hashable:
    """Collect the tensors in dicts and tuples; return what tells their structure, None if it holds anything else.

    Args:
        value: The dicts and tuples.
        tensors: Where the tensors are put.
        rule: A rule that may be among them.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return HOLE
    if value is None:
        return "None"
    if rule is not None and value is rule.made:
        tensors.extend(rule.tensors)
        return "rule"
    if type(value) not in (dict, tuple, Tasks):
        return None
    forms: list[Hashable] = []
    for item in value.values() if type(value) is dict else value:  # type: ignore[attr-defined, union-attr]
        if isinstance(item, Tensor):  # without a call for each
            tensors.append(item)
            forms.append(HOLE)
        elif (form := _form_of(item, tensors, rule)) is None:
            return None
        else:
            forms.append(form)
    return type(value), tuple(value) if type(value) is dict else (), tuple(forms)  # type: ignore[arg-type]


_QUERY_LOSSES = 2  # among the fields of an evaluation


def _alike(grads: Sequence[Tensor], given: Mapping[int, Tensor]) -> Sequence[Tensor] | None:
    """Weight a gradient to which every task contributes; None unless all weights are equal, as in the mean."""
    if list(given) != [0]:
        return None
    first, *others = given[0].reshape(-1).tolist()
    alike = all(weight == first for weight in others)
    return _torch.foreach_mul(grads, first) if alike else None  # type: ignore[reportPrivateImportUsage]


def _of_mean(grads: Sequence[Tensor], given: Mapping[int, Tensor]) -> Sequence[Tensor] | None:
    """Weight the gradient of the mean over tasks, the last result, which may also be formed of the query losses."""
    if list(given) == [_QUERY_LOSSES]:
        weights = given[_QUERY_LOSSES].reshape(-1).tolist()
        alike = all(weight == weights[0] for weight in weights)
        return _torch.foreach_mul(grads, sum(weights)) if alike else None  # type: ignore[reportPrivateImportUsage]
    first, *others = given.values()
    if others or first.ndim:
        return None
    weight = first.item()
    return grads if weight == 1 else _torch.foreach_mul(grads, weight)


class CompiledMAML(CompiledStep):
    """What is compiled of a MAML: an inner step with its vector-Jacobian product, the query loss, or a meta-batch.

    Args:
        options: What ``compile=`` says.

    Attributes:
        output_shape: The shape of the predictions for the support examples of a task, once known.
        by_steps: Whether even small meta-batches go by steps, since a backward pass has weighted tasks differently.
    """

    def __init__(self, options: CompileOptions) -> None:
        super().__init__("MAML(..., compile)", options)
        self.query = ValueAndGrad(self, options.options, 0, _task_by_task)
        self.query_of_shared = ValueAndGrad(self, options.options, 0, _alike)
        # Unless one graph was asked for, the first backward pass with other weights is the last with this graph.
        self.meta_batch = ValueAndGrad(
            self, options.options, -1, self._of_mean, compiles_products=options.whole is True
        )
        self.by_steps = False
        self.output_shape: tuple[int, ...] | None = None
        self._longest: tuple[object, int] = (None, 0)
        self._kept: _KeptRule | None = None
        self._structures: dict[Hashable, Structure] = {}
        self._is_small: dict[Hashable, bool] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle what is to be compiled, but nothing that was."""
        return type(self), (self.options,)

    def query_loss(
        self, loss: Callable[..., Sequence[Nested]], shared: Params, params: Params, x: Nested, y: Nested
    ) -> tuple[Tensor, Tensor]:
        """Return losses and predictions of adapted parameters, ``loss(shared, params, x, y)``."""
        compiled = self.query_of_shared if shared else self.query
        return self._called(compiled, loss, (shared, params, x, y))  # type: ignore[return-value]

    def whole_batch(
        self,
        evaluate: Callable[..., tuple[Any, ...]],
        shared: Params,
        params: Params,
        tasks: Tasks,
        rule: Rule,
    ) -> tuple[Tensor, ...]:
        """Return ``evaluate(shared, params, tasks, rule)`` from one graph."""
        return self._called(self.meta_batch, evaluate, (shared, params, tasks, rule))

    def kept_batch(
        self,
        evaluate: Callable[..., tuple],
        args: tuple[Any, ...],
        looking_at: Callable[[Sequence[Tensor]], Look | None],
    ) -> tuple[tuple[Tensor, ...], bool] | None:
        """Return what :meth:`whole_batch` does, and whether it is known to be finite, if that was compiled before.

        Args:
            evaluate: As there.
            args: Likewise.
            looking_at: Returns what looks at the cotangents of tensors; None keeps the code from being called.
        """
        tensors, structure = self._dissected(args)
        look = looking_at(tensors)
        return (
            None if look is None else self.meta_batch.kept(FlatFunction(evaluate, structure), tensors, look)
        )

    def _called(
        self, compiled: ValueAndGrad, function: Callable[..., Sequence[Nested]], args: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        tensors, structure = self._dissected(args)
        flat = FlatFunction(function, structure)
        return compiled(lambda: self.check(flat, tensors).read, flat, tensors)

    def _of_mean(self, grads: Sequence[Tensor], given: Mapping[int, Tensor]) -> Sequence[Tensor] | None:
        products = _of_mean(grads, given)
        self.by_steps = self.by_steps or products is None
        return products

    def is_small(
        self, evaluate: Callable[..., tuple[Any, ...]], args: tuple[Any, ...], steps: int, num_tasks: int
    ) -> bool:
        """Say whether ``evaluate(*args)``, with ``args`` as of :meth:`whole_batch`, takes few small steps.

        One graph of them takes as long to compile as a step and its derivative do, and half of their time.
        """
        if not are_few(steps):
            return False
        tensors, structure = self._dissected(args)
        form = steps, *(tensor.shape for tensor in tensors)
        if form not in self._is_small:
            if len(self._is_small) == _MOST_STRUCTURES:
                self._is_small.clear()
            _, params, tasks, _ = args
            num_elements = num_tasks * sum(map(torch.numel, params.values())) + sum(
                map(torch.numel, tensors_in(tasks))
            )
            self._is_small[form] = are_small(0, num_elements) and are_small(
                self.check(FlatFunction(evaluate, structure), tensors).num_calls // (steps + 1), num_elements
            )
        return self._is_small[form]

    def _dissected(self, args: tuple[Any, ...]) -> tuple[list[Tensor], Structure]:
        """Take arguments apart; the structures of tensors, by name or not, and of the kept rule are kept."""
        tensors: list[Tensor] = []
        form = _form_of(args, tensors, self._kept)
        if form is None:
            return dissect(args)
        if form not in self._structures:
            if len(self._structures) == _MOST_STRUCTURES:
                self._structures.clear()
            self._structures[form] = dissect(args)[1]
        return tensors, self._structures[form]

    def note_outputs(self, losses: Tensor, predictions: Nested) -> None:
        """Note the shape of the predictions of a task; refuse what is no tensor."""
        _, tensor = checked_tensors((losses, predictions))
        self.output_shape = tuple(tensor.shape[losses.ndim :])

    def attempt(self, compiled: Callable[[], T], eager: Callable[[], T]) -> T:
        """Return what ``compiled()`` returns, or ``eager()`` if that cannot be, or would lose a gradient."""

        def without_free_tensors() -> T:
            try:
                return compiled()
            except FreeTensorError as error:
                raise UncompilableError(
                    f"loss_fn or the model reads a tensor of shape {error.shape} that requires grad and is no "
                    "parameter of the model (detach it if it is not to be learned)"
                ) from error

        return super().attempt(without_free_tensors, eager)

    def check(self, eager: Callable[[list[Tensor]], Sequence[Tensor]], tensors: Sequence[Tensor]) -> Checked:
        """Run uncompiled what is to be compiled; refuse what compiling would lose."""
        handed = [operand(tensor, True) for tensor in tensors]
        return check_compilable(lambda *tensors: tuple(eager(list(tensors))), tuple(handed), self.call)

    def rule(self, rule: Rule, like: Tensor, start: Callable[[], Params], steps: int) -> Rule:
        """Return a rule with every number as a 0-d tensor, so that another number needs no recompilation.

        Args:
            rule: The rule.
            like: One of the parameters, for its dtype and device.
            start: Returns what the steps start from.
            steps: How many there are.

        Raises:
            ValueError: The rule has no value for the last of the steps, which compiled code cannot see.
        """
        form = steps, like.dtype, like.device
        kept = self._kept
        if kept is not None and kept.rule is rule and kept.form == form:
            return kept.made
        made = self._with_tensors(rule, start(), steps)
        if is_constant(rule) and not torch.is_inference_mode_enabled():
            tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
            self._kept = _KeptRule(rule, form, made, tensors)
            self._structures.clear()
        return made

    def _with_tensors(self, rule: Rule, params: Params, steps: int) -> Rule:
        # Values for each step are items of a sequence or entries of a tensor.
        leaves, spec = tree_flatten(rule)
        form = spec, [leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves]
        known, longest = self._longest
        if steps > longest or form != known:
            _take_step(rule, params, steps - 1)
            self._longest = form, steps
        return with_tensors(rule, params)


def _take_step(rule: Rule, params: Params, number: int) -> None:
    """Run a rule's step of this number, so that it can raise; the ints of its state count steps."""
    with torch.no_grad():
        state = tree_map(lambda leaf: number if type(leaf) is int else leaf, rule.init(params))
        rule.update({name: torch.zeros_like(p) for name, p in params.items()}, state, params)


def with_tensors(rule: Rule, params: Params) -> Rule:
    """Return a rule with every number as a 0-d tensor.

    The number 0 stays a number: a rule leaves out the momentum or the decay that is not used.
    """
    like = next(iter(params.values()))
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32

    def made(leaf: object) -> object:
        if not isinstance(leaf, (int, float)) or isinstance(leaf, bool):
            return leaf
        # A float among the arguments would be made a tensor by the loop.
        return torch.full((), leaf, dtype=dtype, device=like.device) if leaf else 0

    return tree_map(made, rule)


def refuse_model(model: nn.Module, tables: Sequence[str]) -> None:
    """Raise for what torch.compile would silently ignore, or cannot compile."""
    if tables:
        named = ", ".join(map(repr, dict.fromkeys(tables)))
        raise UncompilableError(f"only the rows of {named} are there, as sparse= says")
    for name, module in named_modules(model):
        if not is_plain(module):
            raise UncompilableError(
                f"{type(module).__name__} ({name or 'the model itself'}) has hooks or a forward of its own"
            )
