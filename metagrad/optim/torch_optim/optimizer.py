"""The base class of ``torch.optim`` optimizers that take the steps of a rule."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from metagrad.autograd.checks.finite import is_finite
from metagrad.autograd.derivatives.grad import refuse_complex
from metagrad.core.checks import check_choice, refuse, warn
from metagrad.core.modules import refuse_sharded
from metagrad.core.tree import Params
from metagrad.optim.per_parameter import check_real
from metagrad.optim.torch_optim.sparse_gradients import as_rows
from metagrad.optim.torch_optim.state import ParameterState, PendingUpdate, keeping_dtypes, step_whole
from metagrad.sparse.tables.row_sparse import RowSparse

ParameterGroups: TypeAlias = "Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]"
"""Parameters, parameters with their names, or groups of parameters with their own hyperparameters."""

Group: TypeAlias = dict[str, Any]
"""One of an optimizer's ``param_groups``."""

Computed = TypeVar("Computed")

FAILED_FACTORIZATIONS: Any = (torch.linalg.LinAlgError, np.linalg.LinAlgError)  # type: ignore[reportPrivateImportUsage]


class ParamsWithGrad(NamedTuple):
    """The parameters of a group that have gradients, by name."""

    group: Group
    params: Params
    grads: Params


def _checked_params(name: str, params: Any) -> list[Any]:
    """Return parameters or groups as a list. Raise ``TypeError`` for anything else."""
    one = not isinstance(params, Iterable) or isinstance(params, (Mapping, Tensor, str))
    given = [params] if one else list(params)
    for item in given:
        own = item.get("params", item) if isinstance(item, Mapping) and not one else item
        for p in own if isinstance(own, (list, tuple)) and own is not item else [own]:
            value = p[1] if isinstance(p, tuple) and len(p) == 2 else p
            if one or isinstance(value, (str, int, float, Mapping, tuple)):
                place = "" if one else f" in a {type(params).__name__}"
                raise TypeError(
                    f"{name}(params): expected parameters, as model.parameters() or [model.weight], or a list of "
                    f"dicts with the key 'params', got {type(value).__name__}{place}."
                )
    return given


class RuleOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` that takes the steps of a rule.

    ``class Lion(RuleOptimizer, rule=LionRule)`` defines a subclass. Its arguments are the fields of the rule, with
    their defaults. Hyperparameters are stored only in ``param_groups``, where schedulers find
    them. Each step makes a rule of a group's hyperparameters. The rule does the arithmetic. This class writes the
    parameters in place, stores the state, and implements the rest of ``torch.optim``'s interface.

    A step is computed before it is written. Nothing changes if the loss, a gradient, the curvature or a result is NaN
    or infinite, or if a matrix cannot be factorized. Such a step raises an error or is left out, by ``nonfinite``.
    The check costs the norms of gradients and new values, and a synchronization on an accelerator. During a step,
    the new values and the new state need memory in addition to the old values and the old state.

    A parameter in half precision is updated in float32 and rounded. Its state stays in float32, also after loading a
    state.

    Raises:
        ValueError: A hyperparameter is out of its range, or not a number or a 0-d tensor.
        TypeError: A parameter is complex, or an argument is unknown.
    """

    rule: ClassVar[type]
    """The functional optimizer."""
    takes_rows: ClassVar[bool] = False
    """Whether gradients may be row-sparse."""
    __signature__: ClassVar[inspect.Signature]
    _losses: Sequence[Tensor] = ()
    """The losses of this step."""

    def __init_subclass__(
        cls, rule: type | None = None, without: Sequence[str] = (), **defaults: Any
    ) -> None:
        """Define the arguments by the fields of a rule.

        Args:
            rule: A class made by :func:`~metagrad.optim.rule.functional_optimizer`, or None for a base class.
            without: Fields of the rule that are not arguments.
            defaults: Defaults that replace the rule's defaults.
        """
        super().__init_subclass__()
        if rule is None:
            return
        cls.rule = rule
        made, either = inspect.Parameter, inspect.Parameter.POSITIONAL_OR_KEYWORD
        fields = [
            made(f.name, either, default=defaults.get(f.name, f.default), annotation=_type(f.type))
            for f in dataclasses.fields(rule)
            if f.name not in (*without, "batch_ndim")
        ]
        nonfinite = made(
            "nonfinite", made.KEYWORD_ONLY, default="raise", annotation="Literal['raise', 'skip']"
        )
        cls.__signature__ = inspect.Signature([made("params", either), *fields, nonfinite])

    def __init__(self, *args: Any, **options: Any) -> None:
        try:
            given = self.__signature__.bind(*args, **options)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}(params, ...): {error}.") from None
        given.apply_defaults()
        self._initialize(given.arguments.pop("params"), given.arguments)

    def _initialize(self, params: ParameterGroups, defaults: Mapping[str, Any]) -> None:
        """Initialize the optimizer with the defaults of a group."""
        params = _checked_params(type(self).__name__, params)
        super().__init__(params, {"nonfinite": "raise", **defaults, "step": 0})

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with their own hyperparameters. Missing hyperparameters take the defaults."""
        super().add_param_group(param_group)
        try:
            self._check_group(len(self.param_groups) - 1)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        param_group["step"] = max(group["step"] for group in self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: Computes the loss and its gradients, and returns the loss.

        Returns:
            The result of the closure, without its graph.

        Raises:
            ValueError: The loss is complex.
            FloatingPointError: The loss, a gradient, the curvature or a result is NaN or infinite. Parameters and
                state are unchanged. With ``nonfinite="skip"`` the step is left out instead, and counted in
                :attr:`stats`.
            torch.linalg.LinAlgError: A finite matrix could not be factorized. Parameters and state are also
                unchanged.
        """
        try:
            loss = None if closure is None else self._evaluated(closure)
            if isinstance(loss, Tensor):
                refuse_complex(f"{type(self).__name__}.step(closure)", loss)
            if loss is not None:
                self._losses = [*self._losses, *_numbers(loss)]
            if closure is not None and all(p.grad is None for p in self._all_params()):
                warn(
                    f"{type(self).__name__}.step(closure): no parameter has a gradient after the closure, so none "
                    "moves. Call loss.backward() in it."
                )
            self._move()
        finally:
            self._forget()
        return loss.detach() if isinstance(loss, Tensor) else loss

    @property
    def stats(self) -> dict[str, Any]:
        """``skipped``: number of skipped steps, because of NaN, Inf or a failed factorization."""
        return {"skipped": self.__dict__.get("_skipped", 0)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state.

        Tensors go to the devices of their parameters. Floating point tensors are converted to the dtype of steps.
        """
        with keeping_dtypes(self):
            super().load_state_dict(state_dict)

    def _forget(self) -> None:
        """Drop the losses and the curvature since the last step."""
        self._losses = []

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            return closure()

    def _move(self) -> None:
        """Update every parameter that has a gradient, or none if anything is not finite."""
        work = self._all_work()
        if not self._are_finite([*self._seen_losses(), *chain.from_iterable(map(self._observed, work))]):
            return
        changes = self._factorized(
            lambda: [change for one in work if one.params for change in self._updates(one)]
        )
        if changes is None or not self._are_finite([pair for change in changes for pair in change.tensors()]):
            return
        for change in changes:
            change.write(self.state)
        for group in self.param_groups:
            group["step"] += 1

    def _all_work(self) -> list[ParamsWithGrad]:
        return [self._work(group, self._named(index)) for index, group in enumerate(self.param_groups)]

    def _work(self, group: Group, named: Params) -> ParamsWithGrad:
        """Return the parameters of a group that have elements and a gradient."""
        params = {key: p for key, p in named.items() if p.grad is not None and p.numel()}
        grads: Params = {key: as_rows(p.grad) for key, p in params.items()}  # type: ignore[arg-type]
        for key, g in grads.items():
            if isinstance(g, RowSparse) and not self.takes_rows:
                raise self._without_rows(key)
        return ParamsWithGrad(group, params, grads)

    def _without_rows(self, key: str) -> TypeError:
        name = type(self).__name__
        return TypeError(
            f"{name}.step: the gradient of {key!r} is sparse, and a step of {name} moves every row. Use "
            "nn.Embedding(sparse=False), or SparseAdam for this table."
        )

    def _observed(self, work: ParamsWithGrad) -> Iterator[tuple[str, Tensor]]:
        """Yield the inputs of a group's step, which must be finite: gradients and curvature."""
        for key, g in work.grads.items():
            yield f"the gradient of {key!r}", g

    def _seen_losses(self) -> Iterator[tuple[str, Tensor]]:
        if not hasattr(self, "found_inf"):  # a scaled loss may overflow although its gradient does not
            for loss in self._losses:
                yield "the loss", loss

    def _are_finite(self, described: Sequence[tuple[str, Tensor]]) -> bool:
        """Return whether all tensors are finite. If not, raise an error or count the step as skipped."""
        if is_finite([tensor for _, tensor in described]):
            return True
        if not self._leaves_out():
            what = next(name for name, tensor in described if not is_finite([tensor]))
            raise FloatingPointError(
                f"{type(self).__name__}.step: {what} is NaN or infinite; parameters and state are left as they were. "
                "Lower the learning rate, or look in the loss for a root, a logarithm or a division at zero; "
                'nonfinite="skip" leaves such steps out, and counts them in opt.stats["skipped"].'
            )
        return False

    def _factorized(self, compute: Callable[[], Computed]) -> Computed | None:
        """Return the result, or None if a factorization fails, which counts the step as skipped."""
        try:
            return compute()
        except FAILED_FACTORIZATIONS:
            if not self._leaves_out():
                raise
            return None

    def _leaves_out(self) -> bool:
        """Return whether failed steps are skipped, and if so count one skipped step."""
        if self.param_groups[0].get("nonfinite", "raise") != "skip":
            return False
        self._skipped = self.stats["skipped"] + 1
        return True

    def _updates(self, work: ParamsWithGrad) -> Iterator[PendingUpdate]:
        """Compute the step of a group, together for parameters that have taken the same number of steps."""
        group, params, grads = work
        by_step: dict[int | None, dict[str, ParameterState]] = defaultdict(dict)
        for key, p in params.items():
            kept = self.state.get(p, {})
            by_step[kept.get("step")][key] = kept
        for states in by_step.values():
            own, own_grads = ({key: tensors[key] for key in states} for tensors in (params, grads))
            yield step_whole(self._rule(group), own, own_grads, states)

    def _rule(self, group: Group) -> Any:
        """Make the rule of a group's hyperparameters."""
        names = self.defaults.keys() & self.rule.__dataclass_fields__.keys()
        return _made(self.rule, tuple((name, as_number(group[name])) for name in names))

    def _all_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _named(self, index: int) -> Params:
        """Return the parameters of a group by name, or by place if names are missing or repeated."""
        group = self.param_groups[index]
        names = [f"param_groups[{index}][{place}]" for place in range(len(group["params"]))]
        given = group.get("param_names", names)
        if len(set(given)) < len(given):  # for example of two models
            given = [f"{place}: {name}" for place, name in zip(names, given, strict=True)]
        return dict(zip(given, group["params"], strict=True))

    def _check_group(self, index: int) -> None:
        name, group = type(self).__name__, self.param_groups[index]
        for option in self.defaults:
            _check_form(name, option, group[option])
        check_choice(f"{name}(params, nonfinite)", group["nonfinite"], ("raise", "skip"))
        if group["nonfinite"] != self.param_groups[0]["nonfinite"]:
            raise ValueError(
                f"{name}(params): nonfinite must be the same in all groups, which move together or not at all; got "
                f"{self.param_groups[0]['nonfinite']!r} and {group['nonfinite']!r}."
            )
        rule = self._rule(group)
        refuse_sharded(f"{name}(params)", self._named(index))
        for key, p in self._named(index).items():
            check_real(f"{name}(params)", key, p)
            if any(size > 1 and not stride for size, stride in zip(p.shape, p.stride(), strict=True)):
                raise ValueError(
                    f"{name}(params): elements of {key!r} share memory, as expand() makes them, so that no step can "
                    "be written. Make the parameter of a clone()."
                )
            if hasattr(rule, "check"):
                rule.check(key, p)


def _type(annotation: Any) -> str:
    """Return the annotation of a constructor argument, as text, from the annotation of a rule's field."""
    return str(annotation).replace("Hyperparameter", "float | Tensor")


def _numbers(loss: object) -> list[Tensor]:
    """Return the tensors in the result of a closure that can be checked."""
    if isinstance(loss, Tensor):
        return [loss.detach()] if loss.is_floating_point() else []
    return [torch.tensor(loss)] if isinstance(loss, float) else []


@functools.lru_cache(maxsize=256)
def _made(make: Callable[..., Any], hyperparameters: tuple[tuple[str, Hashable], ...]) -> Any:
    return make(**dict(hyperparameters))


def as_number(value: Any) -> Any:
    """Convert a tensor on the CPU to a number, which needs no synchronization and mixes no devices."""
    if isinstance(value, (tuple, list)):
        return tuple(map(as_number, value))
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.device.type == "cpu" else value.reshape(())


def _check_form(name: str, option: str, value: Any) -> None:
    """Raise an error for a form of a hyperparameter that the group of an optimizer does not support."""
    if isinstance(value, (tuple, list)) and option.startswith(("betas", "ns_")):
        for item in value:
            _check_form(name, option, item)
    elif isinstance(value, Tensor):
        if value.numel() != 1:
            refuse(f"{name}(params): {option}", "one element", tuple(value.shape))
    elif isinstance(value, (tuple, list, dict)):
        raise TypeError(
            f"{name}(params): {option} must be a number or a 0-d tensor, got {type(value).__name__}. Values for "
            "some parameters go into a group, values for each step into a scheduler."
        )
