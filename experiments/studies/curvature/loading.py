"""Models from files: checkpoints of programs, and plain state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from experiments.run.checkpoint import FILE, fingerprint, read

if TYPE_CHECKING:
    from experiments.run.build import Parts

MOST_NAMED = 5


def load_model(path: str, parts: Parts) -> int:
    """Put the parameters of a file into a model, and return the step that they are of (0 if it does not say).

    Args:
        path: A checkpoint, a run folder with `checkpoints/last.pt`, or a file of `model.state_dict()`.
        parts: With the learner; a plain state dict is that of its model.

    Raises:
        ValueError: There is no such file, it is none of these, or its parameters are those of another model.
    """
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    state = _read(file)
    is_run = "fingerprint" in state
    module, values = (parts.module, state["model"]) if is_run else (parts.model, state)
    _refuse_other(file, fingerprint(module), {name: list(value.shape) for name, value in values.items()})
    module.load_state_dict(values)
    return state["step"] if is_run else 0


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"checkpoint: there is no file {file}.")
    state = read(file, "checkpoint")
    if not isinstance(state, dict) or not state:
        raise ValueError(f"checkpoint: {file} holds a {type(state).__name__}, expected a dict of tensors.")
    strangers = [str(key) for key, value in state.items() if not isinstance(value, Tensor)]
    if "fingerprint" not in state and strangers:
        raise ValueError(
            f"checkpoint: {file} is neither a checkpoint of a run nor a state dict: no tensors are its "
            f"{', '.join(strangers[:MOST_NAMED])}. Save model.state_dict() alone."
        )
    return state


def _refuse_other(file: Path, wanted: dict[str, list[int]], saved: dict[str, list[int]]) -> None:
    names = [name for name in {**wanted, **saved} if wanted.get(name) != saved.get(name)]
    if names:
        listed = ", ".join(
            f"{name} is {saved.get(name, 'absent')} there and {wanted.get(name, 'absent')} here"
            for name in names[:MOST_NAMED]
        )
        more = f", and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        raise ValueError(
            f"checkpoint: {file} is of another model: {listed}{more}. Set model=... and task=... alike."
        )
