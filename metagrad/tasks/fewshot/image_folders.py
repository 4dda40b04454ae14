"""Images in folders, one for each class."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from metagrad.core._torch import from_numpy
from metagrad.core.checks import check_choice, check_count
from metagrad.tasks._columns import read_csv
from metagrad.tasks._data_root import find_path, pillow
from metagrad.tasks._groups import SHARES, published_splits, split_name

if TYPE_CHECKING:
    from torch import Tensor


PUBLISHED = ("mini-ImageNet", "CIFAR-FS")  # data sets whose splits are known: 64, 16 and 20 classes each
ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
SIXTEEN_BITS = ("PNG", "PPM")  # formats whose gray levels Pillow may read as mode "I"
SUBFOLDERS = ("images", "data", "")  # folders below the root that may contain the images
SPLIT_FILES = {"train": ["train"], "validation": ["val", "validation"], "test": ["test"]}

Splits = dict[str, list[str]]


class Found(NamedTuple):
    """The images of a folder: files with the names of their classes, and class names by split."""

    files: list[tuple[Path, str]]
    splits: Splits


class ImageFolders(Dataset[Any]):
    """A data set of images in one folder per class, in the layouts of few-shot data sets.

    | layout below the root | example |
    | --- | --- |
    | `train.csv`, `val.csv`, `test.csv` with the columns filename and label, and files in `images/` | mini-ImageNet |
    | `train/CLASS/*`, `val/CLASS/*`, `test/CLASS/*` | tieredImageNet |
    | `CLASS/*`, `images/CLASS/*` or `data/CLASS/*`, with `splits=` | CIFAR-FS |

    Pillow must be installed. It reads an image when the image is indexed. Gray images of 16 bits are scaled to 8
    bits. Hidden folders and files are left out.

    Args:
        root: The folder. A relative path may start at `$METAGRAD_DATA`.
        size: Height and width of the images in pixels. They are resized by Pillow's bilinear filter, which does not
            keep the aspect ratio. None keeps their size.
        splits: The splits of classes in `CLASS/`: `"mini-ImageNet"` or `"CIFAR-FS"` for the published splits, or a
            mapping from `"train"`, `"validation"` and `"test"` to class names.
        transform: Maps a Pillow image to a tensor, as in torchvision. It replaces resizing.
        mode: Image mode of Pillow, `"RGB"` or `"L"`.

    Attributes:
        files: Path of each image.
        targets: Class of each image, as a position in `classes`.
        classes: Sorted names of the classes.
        splits: Class names by the name of the split. Empty if there are no splits.

    Raises:
        ValueError: The folder does not exist or has no images, or lacks a class or a file of a split.
        ImportError: Pillow is not installed.

    Examples:
        >>> data = ImageFolders("mini_imagenet", size=84)  # doctest: +SKIP
        >>> tasks = FewShot(data, ways=5, shots=1, split="train", workers=4)  # doctest: +SKIP

    References:
        Ravi, Larochelle, Optimization as a Model for Few-Shot Learning, 2017 (mini-ImageNet's split).
        Ren et al., Meta-Learning for Semi-Supervised Few-Shot Classification, 2018 (tieredImageNet).
        Bertinetto et al., Meta-Learning with Differentiable Closed-Form Solvers, 2019 (CIFAR-FS).
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        size: int | None = 84,
        splits: str | Mapping[str, Sequence[str]] | None = None,
        transform: Callable[[Any], Tensor] | None = None,
        mode: str = "RGB",
    ) -> None:
        pillow("ImageFolders")
        check_count("ImageFolders(size)", size, optional=True)
        check_choice("ImageFolders(mode)", mode, ("RGB", "L"))
        self.root: Path = find_path("ImageFolders", root)
        self.size: int | None = size
        self.transform = transform
        self.mode = mode
        found = _find(self.root, splits)
        self.splits: Splits = found.splits
        self.classes: list[str] = sorted({name for _, name in found.files})
        numbers = {name: number for number, name in enumerate(self.classes)}
        self.files: list[Path] = [file for file, _ in found.files]
        self.targets: list[int] = [numbers[name] for _, name in found.files]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Return an image, [channels, height, width] uint8 without a transform, and its class."""
        image = self._image(range(len(self))[index])
        if self.transform is not None:
            return self.transform(image), self.targets[index]
        levels = from_numpy(np.array(image)).view(image.height, image.width, -1)
        return levels.permute(2, 0, 1).contiguous(), self.targets[index]

    def _image(self, number: int) -> Any:
        """Return an image of Pillow, resized unless there is a transform."""
        reader, path = pillow("ImageFolders"), self.files[number]
        try:
            with reader.open(path) as file:
                image = self._eight_bits(file).convert(self.mode)
        except (OSError, SyntaxError) as error:  # Pillow's, of a file that is damaged or no image
            raise ValueError(f"ImageFolders: {path} cannot be read as an image: {error}.") from error
        if self.transform is None and self.size is not None:
            image = image.resize((self.size, self.size), reader.Resampling.BILINEAR)
        return image

    def _eight_bits(self, image: Any) -> Any:
        """Return an image with 8 bits per channel. Pillow's own conversion from 16 bits saturates."""
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format in SIXTEEN_BITS):
            levels = np.rint(np.asarray(image) / 257)
            return pillow("ImageFolders").fromarray(levels.astype(np.uint8))
        if image.mode in ("I", "F"):
            raise ValueError(f"ImageFolders: {image.filename} must have 8 or 16 bits a channel, got 32.")
        return image


def _find(root: Path, splits: Any) -> Found:
    """Return the images of a folder in the first layout that fits."""
    found = (_by_tables(root) or _by_split_folders(root)) if splits is None else None
    if found is None:
        no_files: list[tuple[Path, str]] = []
        everywhere = (_by_class(root / name) for name in SUBFOLDERS)
        files = next((found for found in everywhere if found), no_files)
        found = Found(files, _given(splits))
    if not found.files:
        raise ValueError(
            f"ImageFolders: {root} must have a folder for each class, folders train/, val/ and test/ of such, or "
            "train.csv, val.csv and test.csv beside images/; there are no images in these places."
        )
    names = {name for _, name in found.files}
    for split, classes in found.splits.items():
        if lacking := [name for name in classes if name not in names]:
            raise ValueError(
                f"ImageFolders: {root} must have all {len(classes)} classes of the split {split!r}, and "
                f"{len(lacking)} are missing, the first is {lacking[0]!r}."
            )
    return found


def _by_class(folder: Path) -> list[tuple[Path, str]]:
    """Return the images in the subfolders of a folder, sorted, without hidden folders and files."""
    if not folder.is_dir():
        return []
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    files = [file for path in classes for file in sorted(path.iterdir()) if file.suffix.lower() in ENDINGS]
    return [(file, file.parent.name) for file in files if "." not in (file.name[0], file.parent.name[0])]


def _by_split_folders(root: Path) -> Found | None:
    parts = {split: _by_class(folder) for split, folder in _existing(root, "").items()}
    if not any(parts.values()):
        return None
    splits = {split: sorted({name for _, name in part}) for split, part in parts.items()}
    return Found([pair for part in parts.values() for pair in part], splits)


def _by_tables(root: Path) -> Found | None:
    tables = {split: _read_table(path) for split, path in _existing(root, ".csv").items()}
    if not tables:
        return None
    rows = [row for table in tables.values() for row in table]
    folders = [root / name for name in SUBFOLDERS]
    file, label = rows[0]
    places = [(folder, is_by_class) for folder in folders for is_by_class in (False, True)]
    fits = next((place for place in places if _placed(*place, file, label).is_file()), None)
    if fits is None:
        looked = ", ".join(str(_placed(*place, file, label)) for place in places)
        raise ValueError(f"ImageFolders: {file} of {root}'s tables is not there; looked for {looked}.")
    files = [(_placed(*fits, file, label), label) for file, label in rows]
    missing = [path for path, _ in files if not path.is_file()]
    if missing:
        raise ValueError(
            f"ImageFolders: {root} must have the {len(files)} images of its tables, and {len(missing)} are missing, "
            f"the first is {missing[0]}."
        )
    return Found(files, {split: sorted({label for _, label in table}) for split, table in tables.items()})


def _placed(folder: Path, is_by_class: bool, file: str, label: str) -> Path:
    return folder / label / file if is_by_class else folder / file


def _read_table(path: Path) -> list[tuple[str, str]]:
    """Return the files of a table and their classes."""
    table = read_csv("ImageFolders", path)
    names = ("filename", "label")
    table.call = f"ImageFolders: {path}"
    table.declared = dict.fromkeys(names, "text")
    table.keep_complete([("column", name) for name in names], "raise")
    return list(zip(*(table.ids("column", name) for name in names), strict=True))


def _existing(folder: Path, ending: str) -> dict[str, Path]:
    """Return the file or the folder of each split, if it exists."""
    paths = {split: [folder / f"{name}{ending}" for name in names] for split, names in SPLIT_FILES.items()}
    found = {split: next((path for path in some if path.exists()), None) for split, some in paths.items()}
    return {
        split: path for split, path in found.items() if path is not None and path.is_dir() != bool(ending)
    }


def _given(splits: Any) -> Splits:
    """Return splits as lists of class names."""
    if splits is None:
        return {}
    if isinstance(splits, str):
        return published_splits()[check_choice("ImageFolders(splits)", splits, PUBLISHED)]
    named: Splits = {split_name(name): list(classes) for name, classes in splits.items()}
    for name in named:
        check_choice("ImageFolders(splits)", name, SHARES)
    return named
