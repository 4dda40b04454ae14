"""Checkpoints: the whole state of a run as plain dicts, written atomically and sealed with a checksum."""

from __future__ import annotations

import hashlib
import io
from typing import TYPE_CHECKING, Any

import torch

from experiments.run.files import write_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from experiments.run.build import Parts

FILE = "checkpoints/last.pt"
FREE = (
    "device",
    "preflight",
    "resume",
    "logger",
    "log",
    "evaluate",
    "checkpoint",
    "memory",
    "plots",
    "anomaly",
    "iterations",
    "allow",
    "metric",
)
"""Keys that a resumed run may change. They do not affect the training trajectory."""

VERSION = 1
SEAL = b"\nmetagrad checkpoint %d sha256 "
"""The bytes between a torch archive and the hexadecimal SHA-256 digest of the archive, given the version."""


def random_state() -> dict[str, Any]:
    """Return the states of the global generators of torch in this process."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda}


def save(
    path: Path,
    parts: Parts,
    *,
    step: int,
    config: Mapping[str, Any],
    skipped: int = 0,
    random: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Write the state after `step` iterations. A crash leaves either the old file or the new one, whole.

    Args:
        path: The file.
        parts: The objects with a state.
        step: The iterations done.
        config: The configuration, as plain values.
        skipped: Tasks left out since metrics were last written.
        random: The `random_state` of every process of the run. None if there is only this process.
    """
    content = io.BytesIO()  # torch.save into a file says of a full disk "unexpected pos 64 vs 0"
    torch.save(_state(parts, step, config, skipped, random or [random_state()]), content)
    archive = content.getvalue()
    write_bytes(path, archive + SEAL % VERSION + hashlib.sha256(archive).hexdigest().encode())


def load(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint, once its checksum is verified.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is missing, damaged, or no checkpoint of this version.
    """
    if not path.is_file():
        raise ValueError(f"resume: there is no checkpoint {path}.")
    archive, seal, digest = path.read_bytes().rpartition(SEAL % VERSION)
    if not seal:
        raise ValueError(
            f"resume: {path} is not a checkpoint of version {VERSION}; it was cut off, is damaged, or is a file of "
            "another kind."
        )
    if hashlib.sha256(archive).hexdigest().encode() != digest:
        raise ValueError(f"resume: {path} is damaged: its content does not match its checksum.")
    return torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)


def restore(state: Mapping[str, Any], parts: Parts, config: Mapping[str, Any], rank: int = 0) -> int:
    """Load the saved state of one process into a run, and return the number of iterations done.

    Raises:
        ValueError: The checkpoint belongs to another configuration or model (the message names the differences), or
            it is beyond the last iteration.
    """
    _refuse("configuration", _trajectory(state["config"]), _trajectory(config))
    _refuse("model", state["fingerprint"], fingerprint(parts.module))
    if state["step"] > config["iterations"]:
        raise ValueError(
            f"resume: the checkpoint is at step {state['step']} already, so iterations must be at least that, got "
            f"{config['iterations']}."
        )
    parts.module.load_state_dict(state["model"])
    parts.optimizer.load_state_dict(state["optimizer"])
    parts.schedule.load_state_dict(state["schedule"])
    parts.generator.set_state(state["rng"]["tasks"])
    for own in [state["rng"], *state["rng"].get("others", [])][rank : rank + 1]:
        torch.set_rng_state(own["torch"])
        if own["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(own["cuda"])
    return state["step"]


def fingerprint(module: torch.nn.Module) -> dict[str, list[int]]:
    """Return the name and shape of every parameter and buffer."""
    return {name: list(tensor.shape) for name, tensor in module.state_dict().items()}


def _state(
    parts: Parts, step: int, config: Mapping[str, Any], skipped: int, random: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    first, *others = random
    return {
        "step": step,
        "config": dict(config),
        "fingerprint": fingerprint(parts.module),
        "skipped": skipped,
        "model": parts.module.state_dict(),
        "optimizer": parts.optimizer.state_dict(),
        "schedule": parts.schedule.state_dict(),
        "rng": {**first, "tasks": parts.generator.get_state(), "others": others},
    }


def _trajectory(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(_leaves({key: value for key, value in config.items() if key not in FREE}, ""))


def _refuse(what: str, saved: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    names = [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]
    if names:
        listed = ", ".join(
            f"{name} is {saved.get(name, 'absent')} there and {wanted.get(name, 'absent')} here"
            for name in names[:5]
        )
        more = f", and {len(names) - 5} more" if len(names) > 5 else ""
        raise ValueError(f"resume: the checkpoint is of another {what}: {listed}{more}.")


def _leaves(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
