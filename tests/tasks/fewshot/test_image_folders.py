from __future__ import annotations

import numpy as np
import pytest
import torch

from metagrad.tasks import FewShot, ImageFolders
from metagrad.tasks.fewshot.image_folders import PUBLISHED

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

CLASSES = ["ant", "bee", "cat", "dog"]


def write(path, level):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((6, 8, 3), level, dtype=np.uint8)).save(path)


def write_classes(folder, names=CLASSES, images=3, ending="png"):
    """Write images whose gray level is 50 times the number of the class plus that of the image."""
    for name in names:
        for k in range(images):
            write(folder / name / f"{name}{k}.{ending}", 50 * CLASSES.index(name) + k)


@pytest.fixture(params=["tables", "tables of folders", "split folders"])
def root(request, tmp_path):
    """The same four classes in every layout, two for training."""
    splits = {"train": ["ant", "cat"], "val": ["bee"], "test": ["dog"]}
    if request.param.startswith("tables"):
        for name, classes in splits.items():
            rows = [f"{c}{k}.png,{c}" for c in classes for k in range(3)]
            (tmp_path / f"{name}.csv").write_text("\n".join(["filename,label", *rows]) + "\n")
    if request.param == "tables":
        for name in CLASSES:
            for k in range(3):
                write(tmp_path / "images" / f"{name}{k}.png", 50 * CLASSES.index(name) + k)
    elif request.param == "tables of folders":
        write_classes(tmp_path)
    else:
        for name, classes in splits.items():
            write_classes(tmp_path / name, classes)
    return tmp_path


def test_every_layout_gives_the_same_images(root):
    data = ImageFolders(root, size=None)
    assert data.classes == CLASSES
    assert data.splits == {"train": ["ant", "cat"], "validation": ["bee"], "test": ["dog"]}
    levels = {(data.classes[label], int(x.unique())) for x, label in (data[i] for i in range(len(data)))}
    assert levels == {(name, 50 * CLASSES.index(name) + k) for name in CLASSES for k in range(3)}
    assert data[0][0].shape == (3, 6, 8)
    tasks = FewShot(data, ways=2, shots=1, queries=2, split="train")
    assert tasks.classes == ["ant", "cat"]
    x = tasks.sample(5).query.x
    assert x.shape == (5, 4, 3, 6, 8)
    assert set((x[:, :, 0, 0, 0] * 255).round().flatten().tolist()) <= {0, 1, 2, 100, 101, 102}


def test_sizes_modes_and_jpeg(tmp_path):
    write_classes(tmp_path, ["bee"], ending="JPG")
    x, label = ImageFolders(tmp_path, size=5)[1]
    assert (x.shape, x.dtype, label) == ((3, 5, 5), torch.uint8, 0)
    assert (x.int() - 51).abs().max() <= 2
    assert ImageFolders(tmp_path, size=5, mode="L")[0][0].shape == (1, 5, 5)


def test_a_transform_gets_the_image_of_pillow(tmp_path):
    write_classes(tmp_path)
    data = ImageFolders(tmp_path, transform=lambda image: torch.tensor([image.width, image.height]))
    assert data[0][0].tolist() == [8, 6]
    assert FewShot(data, 2, 1, 2).sample(1).support.x.tolist() == [[[8, 6], [8, 6]]]


@pytest.mark.parametrize("folder", ["", "images", "data"])
def test_splits_are_given_by_name_or_as_they_are(tmp_path, folder):
    for name, splits in PUBLISHED.items():
        for c in (c for classes in splits.values() for c in classes):
            (tmp_path / name / folder / c).mkdir(parents=True)
            (tmp_path / name / folder / c / "0.png").touch()
        assert ImageFolders(tmp_path / name, splits=name).splits == splits
    write_classes(tmp_path / "own" / folder)
    splits = {"train": ["ant"], "test": ["bee"]}
    assert ImageFolders(tmp_path / "own", splits=splits).splits == splits
    assert ImageFolders(tmp_path / "own").splits == {}


def test_folders_are_found_in_the_data_folder(tmp_path, monkeypatch):
    write_classes(tmp_path / "pets")
    monkeypatch.setenv("METAGRAD_DATA", str(tmp_path))
    assert len(ImageFolders("pets")) == 12
    with pytest.raises(ValueError, match="ImageFolders: there is no pots, and there is no /"):
        ImageFolders("pots")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, r"ImageFolders\(size\): expected None or an int of 1 or more, got 0"),
        ({"splits": "imagenet"}, r"\(splits\): expected one of 'mini-ImageNet', 'CIFAR-FS', got 'imagenet'"),
        (
            {"splits": {"train": ["ant", "emu"]}},
            "2 classes of the split 'train', and 1 are missing, .* 'emu'",
        ),
    ],
)
def test_construction_errors(tmp_path, arguments, message):
    write_classes(tmp_path)
    with pytest.raises(ValueError, match=message):
        ImageFolders(tmp_path, **arguments)


def test_tables_name_what_is_missing(tmp_path):
    write_classes(tmp_path / "images", ["ant"])
    table = tmp_path / "train.csv"
    table.write_text("filename,label\nant0.png,ant\nant7.png,ant\n")
    with pytest.raises(ValueError, match="must have the 2 images of its tables, and 1 are missing"):
        ImageFolders(tmp_path)
    table.write_text("filename,label\nemu.png,emu\n")
    with pytest.raises(ValueError, match=r"emu\.png of .*'s tables is not there; looked for .*images"):
        ImageFolders(tmp_path)
    table.write_text("file,class\nant0.png,ant\n")
    with pytest.raises(ValueError, match=r"train\.csv must have the columns filename and label"):
        ImageFolders(tmp_path)


@pytest.mark.parametrize("left", [0, 45], ids=["empty", "cut off"])
def test_a_damaged_image_is_named(tmp_path, left):
    write_classes(tmp_path, ["ant"])
    path = tmp_path / "ant" / "ant0.png"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match=r"ImageFolders: .*ant0\.png cannot be read as an image: "):
        ImageFolders(tmp_path)[0]
