import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from metagrad.tasks import FewShot
from tests.draws import seeded

SIZES = (6, 9, 12, 20)
WORKERS = pytest.mark.filterwarnings("ignore:.*(multi-threaded, use of fork|DataLoader will create)")


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs that are (number of the item, its label), classes of unequal size, in mixed order."""
    labels = torch.arange(4).repeat_interleave(torch.tensor(SIZES))[torch.randperm(47, generator=seeded())]
    return torch.stack([torch.arange(47.0), labels.float()], 1), labels


class Lazy(Dataset):
    """A data set of the same items as pairs. It records the items that are read."""

    def __init__(self):
        self.x, self.targets = data()
        self.classes = ["ant", "bee", "cat", "dog"]
        self.read = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.read.append(index)
        return self.x[index].numpy(), int(self.targets[index])


class Noisy(Lazy):
    """Adds random numbers of torch, NumPy and Python."""

    def __getitem__(self, index):
        x, label = super().__getitem__(index)
        return x + float(torch.rand(())) + np.random.rand() + random.random(), label


def same(one, other) -> bool:
    return all(torch.equal(a, b) for p, q in zip(one, other, strict=True) for a, b in zip(p, q, strict=True))


def test_a_label_is_one_class_and_no_item_is_drawn_twice():
    batch = FewShot(data(), ways=3, shots=2, queries=4).sample(40, generator=seeded())
    x = torch.cat([part.x.view(40, 3, -1, 2) for part in batch], 2)
    assert (x[..., 1] == x[..., :1, 1]).all()
    assert all(len(set(task.flatten().tolist())) == 18 for task in x[..., 0])
    assert all(len(set(task.tolist())) == 3 for task in x[:, :, 0, 1])


@pytest.mark.parametrize("shots", [2, (1, 3)], ids=str)
def test_where_the_items_are_changes_nothing(shots):
    ways = 3 if shots == 2 else (2, 4)
    x, labels = data()
    sources = [
        FewShot((x, labels), ways, shots, 2),
        FewShot((x.numpy(), labels.tolist()), ways, shots, 2),
        FewShot(Lazy(), ways, shots, 2, in_memory=True),
        FewShot(TensorDataset(x, labels), ways, shots, 2, in_memory=True),
        FewShot(Subset(Lazy(), range(47)), ways, shots, 2, in_memory=True),
    ]
    sources += [FewShot(Lazy(), ways, shots, 2), FewShot([Lazy()[i] for i in range(47)], ways, shots, 2)]
    generators = [seeded() for _ in sources]
    for _ in range(3):
        first, *others = [tasks.sample(5, generator=g) for tasks, g in zip(sources, generators, strict=True)]
        assert all(same(first, other) for other in others)


def test_in_memory_reads_once_and_transforms_each_time():
    dataset = Lazy()
    tasks = FewShot(dataset, 2, 1, 2, in_memory=True, transform=lambda x: x + torch.rand(()))
    dataset.read.clear()
    one, other = (tasks.sample(4, generator=seeded(seed)).query.x for seed in (0, 1))
    assert not dataset.read
    assert torch.equal(one, tasks.sample(4, generator=seeded()).query.x)
    assert not torch.equal(one % 1, other % 1)


def test_padding_is_zeros_and_is_not_read():
    dataset = Lazy()
    tasks = FewShot(dataset, ways=(2, 4), shots=(1, 3), queries=2)
    dataset.read.clear()
    batch = tasks.sample(6, generator=seeded())
    real = [examples.mask for examples in batch]
    assert len(dataset.read) == sum(int(mask.sum()) for mask in real)
    for examples, mask in zip(batch, real, strict=True):
        assert not mask.all()
        assert (examples.x[~mask] == 0).all()
        assert torch.equal(examples.y[mask] >= 0, torch.ones(int(mask.sum()), dtype=torch.bool))
    assert (FewShot(data(), ways=2, queries=2).sample(1).support.mask).all()


@WORKERS
def test_workers_change_nothing_and_load_ahead():
    here, ahead = (FewShot(Noisy(), 2, 1, 2, workers=workers) for workers in (0, 2))
    generators = seeded(), seeded()
    for num_tasks in (3, 3, 2):
        one, other = (
            tasks.sample(num_tasks, generator=g) for tasks, g in zip((here, ahead), generators, strict=True)
        )
        assert same(one, other)
        assert torch.equal(*(g.get_state() for g in generators))
    assert same(here.sample(3, generator=seeded(7)), ahead.sample(3, generator=seeded(7)))
    restored = torch.Generator()
    restored.set_state(generators[0].get_state())
    assert same(here.sample(3, generator=generators[0]), ahead.sample(3, generator=restored))


def test_random_transforms_depend_on_the_generator_alone():
    tasks = FewShot(Noisy(), 2, 1, 2, transform=lambda x: torch.from_numpy(x) + torch.rand(2))
    states = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    one, again, other = (tasks.sample(2, generator=seeded(seed)) for seed in (0, 0, 1))
    assert same(one, again)
    assert not same(one, other)
    fraction = one.support.x[..., 1] % 1
    assert len(fraction.unique()) == fraction.numel()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]


def test_images_are_scaled_and_ids_are_not():
    images = torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1).expand(40, 1, 2, 2)
    labels = torch.arange(40) % 2
    for tasks in (
        FewShot((images, labels), 2, 1, 2),
        FewShot(TensorDataset(images, labels), 2, 1, 2),
    ):
        x = tasks.sample(3, generator=seeded()).query.x
        assert x.dtype == torch.float32
        assert torch.equal((x * 255).round() / 255, x)
        assert 0.02 < x.max() <= 39 / 255
    assert FewShot((images, labels), 2, 1, 2, dtype=torch.float64).sample(1).query.x.dtype == torch.float64
    assert FewShot((labels, labels), 2, 1, 2).sample(1).query.x.dtype == torch.int64
    assert FewShot((images.double(), labels), 2, 1, 2).sample(1).query.x.dtype == torch.float64


def test_classes_by_label_by_name_and_by_split():
    assert FewShot(data(), 2, 1, 2, classes=[3, 1]).classes == [3, 1]
    tasks = FewShot(Lazy(), 2, 1, 2, classes=["dog", "bee"])
    assert set(tasks.sample(20, generator=seeded()).query.x[..., 1].unique().tolist()) == {1, 3}
    splits = {"train": ["ant", "bee"], "val": ["cat"], "test": ["dog"]}
    assert FewShot(Lazy(), 1, 1, 2, classes=splits, split="validation").classes == ["cat"]
    dataset = Lazy()
    dataset.splits = splits
    assert FewShot(dataset, 2, 1, 2, split="train").classes == ["ant", "bee"]
    assert FewShot(dataset, 2, 1, 2).num_classes == 4


def test_small_classes_are_left_out_when_told_to():
    tasks = FewShot(Lazy(), 2, 4, 5, on_small="skip")
    assert tasks.skipped == ["ant"]
    assert tasks.classes == ["bee", "cat", "dog"]
    assert (tasks.sample(20).support.x[..., 1] > 0).all()


class Relabelled(Dataset):
    """Changes the labels of a data set, and forwards its attributes."""

    def __init__(self, dataset, change):
        self.dataset, self.change = dataset, change

    def __getattr__(self, name):
        return getattr(self.dataset, name)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        x, label = self.dataset[index]
        return x, self.change(label, index)


@pytest.mark.parametrize(
    ("change", "classes"),
    [
        (lambda label, _: label, ["ant", "bee", "cat", "dog"]),
        (lambda label, _: label // 2, [0, 1]),
        (lambda label, _: torch.tensor(3 - label), [0, 1, 2, 3]),
        (lambda label, _: np.int64(label + 4), [4, 5, 6, 7]),
        (lambda label, _: "abcd"[label], ["a", "b", "c", "d"]),
    ],
    ids=["same", "coarse", "reversed", "shifted", "names"],
)
def test_labels_are_what_the_items_have(change, classes):
    changed = Relabelled(Lazy(), change)
    for source in (changed, list(changed), Subset(changed, range(1, 47))):
        check_labels(source, change, classes)


def check_labels(source, change, classes):
    tasks = FewShot(source, 2, 1, 2)
    assert tasks.classes == ([0, 1, 2, 3] if "ant" in classes and isinstance(source, list) else classes)
    query = tasks.sample(9, generator=seeded()).query
    for x, y in zip(query.x[..., 1], query.y, strict=True):
        labels = [int(label) if "a" not in classes else label for label in (change(int(v), 0) for v in x)]
        assert len(set(zip(labels, y.tolist(), strict=True))) == len(set(labels)) == 2


def test_a_label_that_changes_is_noticed_when_its_item_is_loaded():
    flipped = Relabelled(Lazy(), lambda label, index: label if index != 45 else (label + 1) % 4)
    with pytest.raises(ValueError, match="item 45 of the data set has the label"):
        FewShot(flipped, 4, 2, 4, in_memory=True)
    assert FewShot(flipped, 4, 2, 4, labels=Lazy().targets, in_memory=True).classes == [0, 1, 2, 3]


def test_a_name_of_two_classes_merges_nothing():
    dataset = Lazy()
    dataset.classes = ["crane", "bee", "crane", "dog"]
    assert FewShot(dataset, 4, 1, 2).classes == [0, 1, 2, 3]


def test_inputs_that_cannot_be_stacked():
    uneven = [(torch.zeros(2 + (i == 3)), i % 2) for i in range(8)]
    with pytest.raises(ValueError, match=r"all inputs must have one shape, got \[\d\] and \[\d\]\. Pass a"):
        FewShot(uneven, 2, 1, 3).sample(1)
    names = TensorDataset(torch.zeros(8), torch.arange(8) % 2)
    with pytest.raises(TypeError, match=r"x of item . must be a tensor or an array, got a str"):
        FewShot(names, 2, 1, 2, transform=str).sample(1)
