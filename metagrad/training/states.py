"""Storage of the states of a training run: in memory, in pinned host memory, or in the files of a folder."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metagrad.core.checks import refuse
from metagrad.core.tree import Tree, dissect, tree_flatten, tree_map_only, tree_unflatten
from metagrad.training.step import State

_FORMAT = "metagrad training 1"
_NUMBER = 4  # bytes of a checksum


class States(dict[int, State]):
    """States in memory, by step number.

    Attributes:
        losses: The losses of the steps so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []


class PinnedStates(States):
    """States in pinned host memory, for a model on an accelerator. Copies overlap with computation."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cpu":
            refuse(
                "Training(...)(offload)", "None or a folder, because states are on the host already", "cpu"
            )
        super().__init__()
        self.device = device

    def __setitem__(self, t: int, state: State) -> None:
        """Copy a state to the host."""
        super().__setitem__(t, tree_map_only(Tensor, _pinned, state))

    def __getitem__(self, t: int) -> State:
        """Copy a state back."""
        kept = super().__getitem__(t)
        return tree_map_only(Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), kept)


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class FolderStates(MutableMapping[int, State]):
    """States in the files of a folder. An interrupted training run resumes from them.

    Files are written to a temporary name and renamed. Each file has a checksum.

    Args:
        folder: The folder, which is created.
        first: The first state, which gives the structure and the devices.
        identity: Number that identifies the training.

    Attributes:
        losses: The losses of the steps before the last state.
        reverse_path: Path of the file of an interrupted backward pass.

    Raises:
        ValueError: The folder has the states of another training run, or a file is damaged.
        OSError: A file cannot be written.
    """

    def __init__(self, folder: Path, first: State, identity: int) -> None:
        self.folder = folder
        self.reverse_path = folder / "reverse.pt"
        self.identity = identity
        self.devices = [t.device for t in dissect(first)[0]]
        self.spec = tree_flatten(first)[1]
        self.losses: list[Tensor] = []
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("*.part"):
            stale.unlink()
        if len(self):
            self.losses = list(self.read(self._path(max(self)))["losses"])
        else:
            self[0] = first

    def _path(self, t: int) -> Path:
        return self.folder / f"state_{t:09d}.pt"

    def __setitem__(self, t: int, state: State) -> None:
        """Write a state, unless its file exists."""
        if t not in self:
            losses = torch.stack(self.losses[:t]) if t else torch.zeros(0)
            self.write(self._path(t), {"leaves": tree_flatten(state)[0], "losses": losses})

    def __getitem__(self, t: int) -> State:
        """Read a state."""
        leaves = self.read(self._path(t))["leaves"]
        devices = iter(self.devices)
        return tree_unflatten(
            [x.to(next(devices)) if isinstance(x, Tensor) else x for x in leaves], self.spec
        )

    def __delitem__(self, t: int) -> None:
        """Remove a file."""
        self._path(t).unlink()

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(int(path.stem.removeprefix("state_")) for path in self.folder.glob("state_*.pt")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, t: object) -> bool:
        return isinstance(t, int) and self._path(t).exists()

    def write(self, path: Path, content: dict[str, Any]) -> None:
        """Write a file atomically, with a checksum."""
        buffer = io.BytesIO()
        torch.save({**content, "format": _FORMAT, "identity": self.identity}, buffer)
        data = buffer.getvalue()
        part = path.with_suffix(".part")
        try:
            part.write_bytes(zlib.crc32(data).to_bytes(_NUMBER, "big") + data)
            os.replace(part, path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise OSError(
                error.errno,
                f"Training(...)(offload): a state could not be written, {error.strerror}",
                str(path),
            ) from error

    def read(self, path: Path) -> dict[str, Any]:
        """Read a file. Raise ``ValueError`` if it is damaged or belongs to another training."""
        data = path.read_bytes()
        if int.from_bytes(data[:_NUMBER], "big") != zlib.crc32(data[_NUMBER:]):
            raise ValueError(
                f"Training(...)(offload): {path} is damaged. Remove it to resume from an earlier state."
            )
        content = torch.load(io.BytesIO(data[_NUMBER:]), weights_only=True)
        if content.get("format") != _FORMAT or content["identity"] != self.identity:
            raise ValueError(
                f"Training(...)(offload): {path} belongs to another training: other data, model, loss, optimizer, "
                "seed, steps or number of states. Choose another folder, or empty this one."
            )
        return content


def checksum(tree: Tree) -> int:
    """Return a number that depends on all bytes and constants of a pytree."""
    total = 0
    for leaf in tree_flatten(tree)[0]:
        content = leaf.detach().cpu().contiguous() if isinstance(leaf, Tensor) else None
        if content is None:
            total = zlib.crc32(repr(leaf).encode(), total)
        else:
            total = zlib.crc32(f"{content.dtype}{tuple(content.shape)}".encode(), total)
            total = zlib.crc32(content.reshape(-1).view(torch.uint8).numpy().data, total)
    return total
