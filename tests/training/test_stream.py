"""The order of the examples is a function of the seed and the step."""

import torch

from metagrad.training.stream import Stream


def test_every_epoch_has_an_order_of_its_own():
    stream = Stream(size=10, batch_size=4, steps=6, seed=0)
    first, second = (torch.cat([stream.rows(t) for t in steps]) for steps in (range(3), range(3, 6)))
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(10))
    assert not torch.equal(first, second)


def test_the_rows_of_a_step_do_not_depend_on_the_steps_before():
    stream = Stream(size=10, batch_size=4, steps=6, seed=0)
    forward = [stream.rows(t) for t in range(6)]
    for t in (5, 0, 4, 1, 3, 2):
        assert torch.equal(stream.rows(t), forward[t])
        assert torch.equal(Stream(size=10, batch_size=4, steps=6, seed=0).rows(t), forward[t])


def test_another_seed_gives_another_order():
    orders = [Stream(size=10, batch_size=10, steps=1, seed=seed).rows(0) for seed in (0, 1)]
    assert not torch.equal(*orders)
