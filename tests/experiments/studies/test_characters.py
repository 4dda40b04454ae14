"""Characters as a closed set of classes."""

from types import SimpleNamespace

import pytest
import torch

import metagrad as mg
from experiments.studies.characters import Examples, by_drawers, load


@pytest.fixture
def levels(monkeypatch):
    """Take six characters of random levels for Omniglot's."""
    images = torch.randint(256, (6, 20, 3, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    monkeypatch.setattr(mg.tasks, "Omniglot", lambda **_: SimpleNamespace(num_classes=6, images=images))
    return images


def test_characters_are_the_first_or_drawn(levels):
    assert torch.equal(load("background"), levels.float() / 255)
    assert torch.equal(load("background", 2), levels[:2].float() / 255)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3))
    drawn = load("background", 4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(drawn, levels[order[:4]].float() / 255)
    with pytest.raises(ValueError, match=r"^search: data.characters must be at most 6, got 7\.$"):
        load("background", 7, key="search: data.characters")


def test_parts_have_people_of_their_own():
    people = torch.arange(20).expand(3, 20)
    train, test = by_drawers(people, 14, 4, classes=torch.tensor([1, 0, 1]))
    assert train.x.unique().tolist() == list(range(14))
    assert test.x.unique().tolist() == [14, 15, 16, 17]
    assert test.y.tolist() == [1] * 4 + [0] * 4 + [1] * 4


def test_examples_are_chosen_joined_and_shuffled():
    examples = Examples(torch.arange(5.0), torch.arange(5))
    assert examples.at(torch.tensor([3, 1])).y.tolist() == [3, 1]
    assert examples.and_also(examples.at(torch.tensor([2]))).x.tolist() == [0, 1, 2, 3, 4, 2]
    batches = examples.batches(2, seed=0)
    for _ in range(2):
        assert len(seen := [y for _, batch in batches for y in batch.tolist()]) == len(set(seen)) == 4
