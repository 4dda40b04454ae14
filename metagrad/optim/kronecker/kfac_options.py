"""The hyper-parameters that the optimizer and the rule of K-FAC have in common, and what they may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metagrad.optim.diagonal.adahessian import check_count
from metagrad.optim.hyperparameters import check_hyperparameter


def check_options(call: str, options: Mapping[str, Any]) -> None:
    """Refuse what is out of its range.

    Args:
        call: What takes the options, for errors.
        options: ``damping``, ``decay``, ``kl_clip``, ``curvature_every``, ``inverse_every``, ``fisher`` and
            ``loss_reduction``, by name; others are not looked at.

    Raises:
        ValueError: A number is out of its range, or a name is none.
        TypeError: A number is of an unknown form.
    """
    check_hyperparameter(call, "damping", options["damping"])
    check_hyperparameter(call, "decay", options["decay"], below=1.0)
    if options["kl_clip"] is not None:
        check_hyperparameter(call, "kl_clip", options["kl_clip"])
    for name in ("curvature_every", "inverse_every"):
        check_count(call, name, options[name])
    if options["inverse_every"] % options["curvature_every"]:
        raise ValueError(
            f"{call}: inverse_every must be a multiple of curvature_every, got {options['inverse_every']} and "
            f"{options['curvature_every']}."
        )
    for name, choices in (("fisher", ("empirical", "sampled")), ("loss_reduction", ("mean", "sum"))):
        if options[name] not in choices:
            raise ValueError(
                f"{call}: {name} must be {choices[0]!r} or {choices[1]!r}, got {options[name]!r}."
            )
