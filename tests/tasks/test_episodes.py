from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metagrad.tasks.episodes import draw_episodes


def draw(num_tasks: int, seed: int = 0, **sizes: int):
    generator = torch.Generator().manual_seed(seed)
    return draw_episodes(num_tasks, **sizes, generator=generator, device=torch.device("cpu"))


def all_distinct(indices: torch.Tensor) -> bool:
    ordered = indices.sort(dim=-1).values
    return bool((ordered[..., 1:] != ordered[..., :-1]).all())


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_choices_are_distinct_and_in_range(data):
    num_classes, class_size = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 20))
    ways, examples = data.draw(st.integers(1, num_classes)), data.draw(st.integers(1, class_size))
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
    classes, _ = draw(20000, num_classes=5, class_size=2, ways=2, examples=1)
    for label in range(2):
        shares = torch.bincount(classes[:, label], minlength=5) / 20000
        # Standard error sqrt(0.2 * 0.8 / 20000) = 0.0028; five of them.
        torch.testing.assert_close(shares, torch.full((5,), 0.2), rtol=0, atol=0.015)


def test_every_member_is_equally_likely_to_be_support():
    _, members = draw(20000, num_classes=2, class_size=4, ways=1, examples=3)
    shares = torch.bincount(members[:, 0, 0], minlength=4) / 20000
    torch.testing.assert_close(shares, torch.full((4,), 0.25), rtol=0, atol=0.016)


def test_members_are_drawn_anew_for_each_class():
    _, members = draw(1, num_classes=8, class_size=20, ways=8, examples=10)
    assert not all(torch.equal(members[0, 0], members[0, k]) for k in range(1, 8))
