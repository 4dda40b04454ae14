"""Few-shot classification tasks from the characters of Omniglot."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from metagrad.core._torch import from_numpy
from metagrad.core.checks import check_choice, check_count
from metagrad.tasks.fewshot import FewShot
from metagrad.tasks.omniglot.files import find_files, read_drawings
from metagrad.tasks.omniglot.splits import DRAWING_SIZE, NUM_DRAWERS, SPLITS

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from metagrad.tasks.omniglot.splits import Character


MAX_LEVEL = 255  # of the stored images
BLOCK = 64  # characters resized at once, 56 MB as float32 (a single character is too little work for threads)


class Omniglot(FewShot):
    r"""Few-shot classification of handwritten characters.

    A task has `ways` distinct classes, labeled 0 to ways - 1 in random order. It has `shots` support images and
    `queries` other query images of each class. Images are [1, size, size], ordered by label. Ink is 1 on a background
    of 0, as in MAML's code. The files have black ink on white.

    | split | characters | source |
    | --- | --- | --- |
    | `"train"`, `"validation"`, `"test"` | 1028, 172, 423 | Vinyals et al. 2016 |
    | `"trainval"` | 1200, both train and validation | Vinyals et al. 2016 |
    | `"background"`, `"evaluation"` | 964, 659 | Lake et al. 2015 |
    | `"small1"` | 136 of the background | Lake et al. 2015 |

    Args:
        root: The data folder, or its subfolder `omniglot`. None means `$METAGRAD_DATA`, else `~/.cache/metagrad`. The
            official zips are used first, then the folders extracted from them, then `omniglot_105_bits.npz`.
        ways: Number of classes of a task.
        shots: Number of support examples of each class.
        queries: Number of query examples of each class.
        split: Name of the split, see the table above.
        rotations: True to add three classes for each character: its rotations by 90, 180 and 270 degrees. A task may
            contain a character in two orientations, as two classes.
        size: Height and width of the images in pixels.
        resize: `"nearest"` resizes as Pillow does with black-and-white files. The results of MAML and many other
            papers use it. `"area"` averages.
        download: True to download the official zips from the repository of the data set if nothing is found.
        device: Device of the images. None means torch's default device.
        dtype: Floating-point type of the images.

    Attributes:
        images: Levels 0 to 255 of all classes, [classes, 20, size, size] uint8.
        num_classes: Number of classes: the characters, times four with rotations.
        protocol_description: One sentence to print next to a result.

    Raises:
        ValueError: An argument is out of range, or files are missing, incomplete or corrupt.
        OSError: A download fails.

    Examples:
        >>> tasks = Omniglot(ways=5, shots=1, split="train")  # doctest: +SKIP
        >>> batch = tasks.sample(32, generator=torch.Generator().manual_seed(0))  # doctest: +SKIP
        >>> batch.support.x.shape, batch.query.y.shape  # doctest: +SKIP
        (torch.Size([32, 5, 1, 28, 28]), torch.Size([32, 75]))

    References:
        Lake, Salakhutdinov, Tenenbaum, Human-level concept learning through probabilistic program
        induction, 2015.
        Vinyals et al., Matching Networks for One Shot Learning, 2016, section 4.1.1.
        Finn, Abbeel, Levine, Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks, 2017,
        section 5.2.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        ways: int = 5,
        shots: int = 1,
        queries: int = 15,
        split: str = "train",
        rotations: bool = True,
        size: int = 28,
        resize: str = "nearest",
        download: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_count("Omniglot(size)", size)
        check_choice("Omniglot(split)", split, SPLITS)
        check_choice("Omniglot(resize)", resize, RESIZERS)
        characters = SPLITS[split].characters
        self.rotations = rotations
        self.resize = resize
        self.files: list[Path] = find_files(root, SPLITS[split], download=download)
        images = load_images(self.files, characters, size=size, resize=resize)
        images = add_rotations(images) if rotations else images
        labels = torch.arange(len(images), device="cpu").repeat_interleave(NUM_DRAWERS)
        drawings = images.flatten(0, 1).unsqueeze(1), labels
        super().__init__(drawings, ways, shots, queries, device=device, dtype=dtype)
        self.split = split

    @property
    def images(self) -> Tensor:
        """Levels 0 to 255 of all classes, [classes, 20, size, size] uint8."""
        assert self._x is not None
        return self._x.view(self.num_classes, NUM_DRAWERS, *self._x.shape[-2:])

    @property
    def protocol_description(self) -> str:
        """Description of the tasks. Print it next to a result, so that others can compare it."""
        size = self.images.shape[-1]
        ways, shots, queries = self.composition
        rotated = "with rotations by 90, 180 and 270 degrees" if self.rotations else "without rotations"
        return (
            f"Omniglot {ways}-way {shots}-shot, {queries} queries per class, "
            f"{self.split} split of {SPLITS[self.split].origin} "
            f"({len(SPLITS[self.split].characters)} characters, "
            f"{self.num_classes} classes {rotated}), "
            f"{size}x{size} by {self.resize} from {DRAWING_SIZE}x{DRAWING_SIZE}, ink = 1, "
            f"from {' and '.join(path.name for path in self.files)}"
        )


def load_images(paths: Sequence[Path], characters: Sequence[Character], *, size: int, resize: str) -> Tensor:
    """Read and resize characters.

    Args:
        paths: Files or folders, as `find_files` returns them.
        characters: Characters to read, in the order of the classes.
        size: Height and width of the images in pixels.
        resize: Key of `RESIZERS`.

    Returns:
        Levels with ink = 255, [characters, 20, size, size] uint8.

    Raises:
        ValueError: A character is in none of the files.
    """
    wanted = set(characters)
    images: dict[Character, Tensor] = {}
    found = chain.from_iterable(read_drawings(path, wanted) for path in paths)
    while block := list(islice(found, BLOCK)):
        levels = from_numpy(np.concatenate([drawings for _, drawings in block]) * MAX_LEVEL)
        resized = torch.split(RESIZERS[resize](levels, size), NUM_DRAWERS)
        images.update(zip((character for character, _ in block), resized, strict=True))
    missing = [f"{c.alphabet}/character{c.number:02d}" for c in characters if c not in images]
    if missing:
        raise ValueError(
            f"Omniglot: {' and '.join(map(str, paths))} must hold the {len(characters)} characters of the "
            f"split, and {len(missing)} are missing, the first is {missing[0]}. "
            "Use the complete official archives."
        )
    return torch.stack([images[character] for character in characters])


def add_rotations(images: Tensor) -> Tensor:
    """Append each class rotated counter-clockwise by 90, 180 and 270 degrees.

    Args:
        images: [C, drawings, size, size].

    Returns:
        [4 * C, drawings, size, size]. Class k * C + c is class c, rotated k times.

    Examples:
        >>> add_rotations(torch.tensor([[[[1, 2], [3, 4]]]])).flatten(1)
        tensor([[1, 2, 3, 4],
                [2, 4, 1, 3],
                [4, 3, 2, 1],
                [3, 1, 4, 2]])
    """
    return torch.cat([images.rot90(k, dims=(-2, -1)) for k in range(4)])


def resize_nearest(drawings: Tensor, size: int) -> Tensor:
    """Take the pixel under the center of each new pixel: new pixel i is old pixel floor((i + 1/2) * old / new).

    Pillow resizes images of mode "1" in this way with any filter. So the code of MAML and of prototypical
    networks, which resizes the files, trains on these images.

    Args:
        drawings: Gray levels, [drawings, side, side] uint8.
        size: Height and width of the result in pixels.

    Returns:
        Levels, [drawings, size, size] uint8.
    """
    source = [(2 * i + 1) * drawings.shape[-1] // (2 * size) for i in range(size)]
    return drawings[:, source][:, :, source]


def resize_area(drawings: Tensor, size: int) -> Tensor:
    """Average over the area of each new pixel.

    An old pixel that is partly covered is weighted by the covered fraction.

    Args:
        drawings: Levels 0 to 255, [drawings, side, side] uint8.
        size: Height and width of the result in pixels.

    Returns:
        Rounded gray levels, [drawings, size, size] uint8.
    """
    weights = _covered_parts(drawings.shape[-1], size, drawings.device)
    return (weights @ (drawings.float() @ weights.T)).round().clamp(0, 255).to(torch.uint8)


def _covered_parts(old: int, new: int, device: torch.device) -> Tensor:
    """Return the part of new pixel i that lies on old pixel j, [new, old]. Rows sum to one."""
    scale, start = old / new, torch.arange(old, device=device)
    left = scale * torch.arange(new, device=device).unsqueeze(1)
    covered = torch.minimum(left + scale, start + 1) - torch.maximum(left, start)
    return covered.clamp(min=0) / scale


RESIZERS: dict[str, Callable[[Tensor, int], Tensor]] = {"nearest": resize_nearest, "area": resize_area}
