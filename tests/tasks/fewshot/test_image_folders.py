import numpy as np
import pytest
import torch

from metagrad.tasks import FewShot, ImageFolders
from metagrad.tasks._groups import published_splits
from metagrad.tasks.fewshot.image_folders import PUBLISHED

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

CLASSES = ["ant", "bee", "cat", "dog"]


def write(path, level):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((6, 8, 3), level, dtype=np.uint8)).save(path)


def write_classes(folder, names=CLASSES, images=3, ending="png"):
    """Write images with gray level 50 * class + image."""
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


def test_splits_are_given_by_name_or_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setenv("METAGRAD_DATA", str(tmp_path))
    for name, folder in zip(PUBLISHED, ("images", "data"), strict=True):
        splits = published_splits()[name]
        for c in (c for classes in splits.values() for c in classes):
            (tmp_path / name / folder / c).mkdir(parents=True)
            (tmp_path / name / folder / c / "0.png").touch()
        assert ImageFolders(name, splits=name).splits == splits
        assert [len(classes) for classes in splits.values()] == [64, 16, 20]
    write_classes(tmp_path / "own")
    splits = {"train": ["ant"], "test": ["bee"]}
    assert ImageFolders("own", splits=splits).splits == splits
    assert ImageFolders("own").splits == {}


@pytest.mark.parametrize(
    ("dtype", "ending"), [("<u2", "png"), ("<u2", "pgm"), ("<u2", "tif"), (">u2", "tif")]
)
def test_levels_of_sixteen_bits_are_scaled_and_hidden_files_left_out(tmp_path, dtype, ending):
    levels = (257 * np.arange(256)).reshape(16, 16)
    for folder in ("ant", ".thumbnails"):
        (tmp_path / folder).mkdir()
        Image.fromarray(levels.astype(dtype)).save(tmp_path / folder / f"0.{ending}")
    (tmp_path / "ant" / f"._0.{ending}").write_bytes(b"the attributes that a Mac stores beside a file")
    data = ImageFolders(tmp_path, size=None, mode="L")
    assert (data.classes, len(data)) == (["ant"], 1)
    assert torch.equal(data[0][0][0], torch.from_numpy(levels // 257).byte())


@pytest.mark.parametrize("kind", [np.float32, np.int32], ids=str)
def test_levels_without_a_range_are_an_error(tmp_path, kind):
    (tmp_path / "ant").mkdir()
    Image.fromarray(np.ones((3, 3), kind)).save(tmp_path / "ant" / "0.tif")
    with pytest.raises(ValueError, match=r"ImageFolders: .*0\.tif must have 8 or 16 bits a channel, got 32"):
        ImageFolders(tmp_path)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, r"ImageFolders\(size\): expected None or an int of 1 or more, got 0"),
        ({"splits": "imagenet"}, r"\(splits\): expected one of 'mini-ImageNet', 'CIFAR-FS', got 'imagenet'"),
        (
            {"splits": {"train": ["ant", "emu"]}},
            "2 classes of the split 'train', and 1 are missing, .* 'emu'",
        ),
        (
            {"splits": {"dev": ["ant"]}},
            r"\(splits\): expected one of 'train', 'validation', 'test', got 'dev'",
        ),
        ({"mode": "CMYK"}, r"ImageFolders\(mode\): expected one of 'RGB', 'L', got 'CMYK'"),
        ({"root": "pots"}, "ImageFolders: there is no pots, and there is no /"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, message):
    write_classes(tmp_path)
    with pytest.raises(ValueError, match=message):
        ImageFolders(**{"root": tmp_path, **arguments})


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
    with pytest.raises(ValueError, match=r"train\.csv: column='filename' is none of .* 'file', 'class'"):
        ImageFolders(tmp_path)
    table.write_text("filename,label\nant0.png,ant\nant1.png, \n")
    with pytest.raises(ValueError, match=r"train\.csv: column='label' has no value in line 3 of"):
        ImageFolders(tmp_path)


@pytest.mark.parametrize("left", [0, 45], ids=["empty", "cut off"])
def test_a_damaged_image_is_named(tmp_path, left):
    write_classes(tmp_path, ["ant"])
    path = tmp_path / "ant" / "ant0.png"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match=r"ImageFolders: .*ant0\.png cannot be read as an image: "):
        ImageFolders(tmp_path)[0]
