import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metagrad.tasks._groups import Groups, draw_distinct
from metagrad.tasks.fewshot.episodes import Composition, draw_episodes
from tests.draws import seeded

CPU = torch.device("cpu")


def of_sizes(*sizes: int) -> Groups:
    """Return classes of consecutive items with these sizes."""
    codes = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return Groups(codes, len(sizes), CPU)


def draw(num_tasks: int, *, num_classes: int, class_size: int, ways: int, examples: int):
    """Draw a balanced batch, and return the classes [tasks, ways] and members [tasks, ways, examples]."""
    composition = Composition(ways, 1, examples - 1)
    parts = draw_episodes(of_sizes(*[class_size] * num_classes), num_tasks, composition, seeded())
    items = torch.cat([part.items.view(num_tasks, ways, -1) for part in parts], -1)
    assert torch.equal(items // class_size, (items // class_size)[..., :1].expand_as(items))
    return (items // class_size)[..., 0], items % class_size


def all_distinct(indices: torch.Tensor) -> bool:
    ordered = indices.sort(dim=-1).values
    return bool((ordered[..., 1:] != ordered[..., :-1]).all())


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_choices_are_distinct_and_in_range(data):
    num_classes, class_size = data.draw(st.integers(1, 30)), data.draw(st.integers(2, 20))
    ways, examples = data.draw(st.integers(1, num_classes)), data.draw(st.integers(2, class_size))
    classes, members = draw(4, num_classes=num_classes, class_size=class_size, ways=ways, examples=examples)
    assert classes.shape == (4, ways)
    assert members.shape == (4, ways, examples)
    assert classes.min() >= 0
    assert classes.max() < num_classes
    assert members.min() >= 0
    assert members.max() < class_size
    assert all_distinct(classes)
    assert all_distinct(members)


def test_every_class_is_equally_likely_at_every_label():
    classes, _ = draw(20000, num_classes=5, class_size=2, ways=2, examples=2)
    for label in range(2):
        shares = torch.bincount(classes[:, label], minlength=5) / 20000
        # Standard error sqrt(0.2 * 0.8 / 20000) = 0.0028. The tolerance is five standard errors.
        torch.testing.assert_close(shares, torch.full((5,), 0.2), rtol=0, atol=0.015)


def test_members_of_unequal_classes_are_in_range_and_equally_likely():
    sizes = torch.tensor([3, 7]).expand(20000, 2)
    members = draw_distinct(sizes, 7, 2, seeded())
    assert all_distinct(members)
    for k, size in enumerate((3, 7)):
        assert members[:, k].max() == size - 1
        shares = torch.bincount(members[:, k].flatten(), minlength=size) / 40000
        # Standard error sqrt(p (1 - p) / 40000) is below 0.0024. The tolerance is five standard errors.
        torch.testing.assert_close(shares, torch.full((size,), 1 / size), rtol=0, atol=0.012)


def check_padding(part, num_tasks):
    """Check that examples come first, in the order of their labels, and padding after them."""
    is_real = part.labels != -100
    assert torch.equal(is_real, part.items >= 0)
    assert is_real.any(0).all(), "no task is as long as the batch"
    for items, labels, real in zip(part.items, part.labels, is_real, strict=True):
        number = int(real.sum())
        assert real[:number].all()
        assert labels[:number].tolist() == sorted(labels[:number].tolist())
        assert len(set(items[:number].tolist())) == number
    assert len(is_real) == num_tasks


def test_ways_and_shots_that_vary():
    classes, composition = of_sizes(9, 9, 9, 12), Composition((2, 4), (1, 5), 4)
    support, query = draw_episodes(classes, 300, composition, seeded())
    check_padding(support, 300)
    check_padding(query, 300)
    assert {int(labels.amax()) + 1 for labels in query.labels} == {2, 3, 4}
    counts = torch.stack([(support.labels == label).sum(1) for label in range(4)], 1)
    assert set(counts.flatten().tolist()) == {0, 1, 2, 3, 4, 5}
    for label in range(4):
        of_label = (query.labels == label).sum(1)
        assert torch.equal(of_label, torch.where(counts[:, label] > 0, 4, 0))
    for own, other in zip(support.items, query.items, strict=True):
        assert not set(own[own >= 0].tolist()) & set(other[other >= 0].tolist())


def test_shots_do_not_take_the_members_that_queries_need():
    support, query = draw_episodes(of_sizes(5, 20), 200, Composition(2, (1, 10), 4), seeded())
    counts = torch.stack([(support.labels == label).sum(1) for label in range(2)], 1)
    assert (query.labels != -100).sum() == 200 * 8
    of_small = torch.where(support.items < 5, support.labels, -100)  # the class of five has one to spare
    assert all(len(task[task >= 0]) == 1 for task in of_small)
    assert counts.amax() == 10


def test_labels_mean_the_same_class_in_support_and_query():
    support, query = draw_episodes(of_sizes(6, 7, 8, 9), 50, Composition((2, 4), (1, 3), 2), seeded())
    bounds = torch.tensor([6, 13, 21])
    for label in range(4):
        classes = [
            torch.where(part.labels == label, torch.bucketize(part.items, bounds, right=True), -1).amax(1)
            for part in (support, query)
        ]
        assert torch.equal(*classes)
