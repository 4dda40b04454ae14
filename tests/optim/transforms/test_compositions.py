"""Chains, clips, masks and schedules, against their parts."""

import pytest
import torch

from metagrad.optim.rules import (
    adam,
    chain,
    clip_by_norm,
    mask,
    schedule,
    sgd,
    with_batch_ndim,
)
from metagrad.sparse.tables.row_sparse import RowSparse
from tests.optim.cases import SHAPES, Decay, draw


def steps(rule, params, num_steps=4, first_seed=1):
    state = rule.init(params)
    for seed in range(first_seed, first_seed + num_steps):
        params, state = rule.update(draw(SHAPES, seed=seed), state, params)
    return params


def assert_same(got, expected):
    assert list(got) == list(expected)
    for key in got:
        torch.testing.assert_close(got[key], expected[key], rtol=1e-12, atol=1e-14)


def moves(rule, grads):
    """Return minus the step of plain gradient descent: the gradients that the last rule saw."""
    params = {k: torch.zeros(g.shape, dtype=g.dtype) for k, g in grads.items()}
    new, _ = rule.update(grads, rule.init(params), params)
    return {k: -p for k, p in new.items()}


@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
def test_clip_by_norm_is_that_of_all_parameters(size):
    grads = {k: size * g for k, g in draw(SHAPES).items()}
    norm = torch.cat([g.flatten() for g in grads.values()]).norm()
    factor = min(1.0, float(1.5 / norm))
    assert (factor < 1) == (size > 0.5)
    assert_same(moves(chain(clip_by_norm(1.5), sgd(1.0)), grads), {k: factor * g for k, g in grads.items()})


def test_clip_by_norm_of_float16_does_not_overflow():
    grads = {"w": torch.full((4,), 300.0, dtype=torch.float16)}
    torch.testing.assert_close(
        moves(chain(clip_by_norm(1.0), sgd(1.0)), grads)["w"], torch.full((4,), 0.5, dtype=torch.float16)
    )


def test_clip_by_norm_of_a_dict_is_refused():
    rule = chain(clip_by_norm({"w": 1.0}), sgd(1.0))
    with pytest.raises(TypeError, match="max_norm bounds the norm of all parameters together, got a dict"):
        moves(rule, {"w": torch.ones(2)})


def test_clips_keep_gradients_row_sparse():
    clip = clip_by_norm(1.0)
    values = 10 * draw({"w": (2, 3)})["w"]
    gradient = RowSparse(torch.tensor([1, 4]), values, (6, 3))
    table = {"w": torch.zeros(6, 3, dtype=torch.float64)}
    clipped, _ = clip.transform({"w": gradient}, clip.init(table), table)
    dense, _ = clip.transform({"w": gradient.to_dense()}, clip.init(table), table)
    assert isinstance(clipped["w"], RowSparse)
    torch.testing.assert_close(clipped["w"].to_dense(), dense["w"])
    assert not torch.equal(dense["w"][1], values[0])


def test_clip_by_norm_of_stacked_rows_is_refused():
    gradient = {"w": RowSparse(torch.tensor([1]), torch.ones(1, 3), (6, 3))}
    clip = with_batch_ndim(clip_by_norm(1.0), 1)
    with pytest.raises(TypeError, match=r"clip_by_norm\(...\).update: the gradient of 'w' is RowSparse"):
        clip.transform(gradient, clip.init(gradient), gradient)


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ((), "rule: expected a functional optimizer, such as .*got 'None"),
        ((clip_by_norm(1.0),), "rule: expected a functional optimizer, such as .*got 'ClipByNorm"),
        ((sgd(0.1), sgd(0.1)), r"link 0 must be a transform, such as clip_by_norm\(1.0\), got SGD"),
    ],
)
def test_chains_that_are_none_are_refused(links, message):
    with pytest.raises(TypeError, match=rf"chain\(\*transforms, rule\): {message}"):
        chain(*links)


def test_a_mask_moves_what_is_named_and_leaves_the_rest():
    params = draw(SHAPES)
    for names in ("w", ["w"], ("?",), lambda name: name == "w", ["[vw]"]):
        got = steps(mask(adam(0.1), names), params)
        named = ("w", "b") if names == ("?",) else ("w",)
        expected = steps(adam(0.1), params)
        assert_same(got, {k: expected[k] if k in named else params[k] for k in params})


def test_a_mask_with_another_rule_is_both():
    params = draw(SHAPES)
    got = steps(mask(adam(0.1), ["b", "scale"], other=sgd(0.2, momentum=0.5)), params)
    by_adam, by_sgd = steps(adam(0.1), params), steps(sgd(0.2, momentum=0.5), params)
    assert_same(got, {"w": by_sgd["w"], "b": by_adam["b"], "scale": by_adam["scale"]})


def test_names_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match=r"init: 'head\.\*' is the name of no parameter; they are \['b'"):
        mask(sgd(0.1), ["w", "head.*"]).init(draw(SHAPES))
    with pytest.raises(TypeError, match="expected parameter names, or a function of a name, got "):
        mask(sgd(0.1), [1])  # type: ignore[list-item]
    for bad in (lambda: mask(0.1, "w"), lambda: mask(sgd(0.1), "w", other=0.1)):
        with pytest.raises(TypeError, match=r"rule: expected a functional optimizer.*got "):
            bad()


def test_a_schedule_equals_a_value_for_each_step():
    params = draw(SHAPES)
    values = [0.1 * 0.5**t for t in range(4)]
    expected = steps(sgd(values, momentum=0.9), params)
    for lr in (Decay(0.1), values, torch.tensor(values, dtype=torch.float64), values.__getitem__):
        assert_same(steps(schedule(sgd(1.0, momentum=0.9), lr=lr), params), expected)


def test_a_schedule_that_starts_at_zero_keeps_its_state():
    """A momentum of the number 0 has no velocities."""
    params = draw(SHAPES)
    expected = steps(sgd(0.1, momentum=[0.0, 0.3, 0.6, 0.9]), params)
    assert_same(steps(schedule(sgd(0.1), momentum=lambda t: 0.3 * t), params), expected)


def test_a_schedule_may_set_betas_and_what_is_in_a_chain():
    params = draw(SHAPES)
    rule = chain(clip_by_norm(1.0), schedule(adam(0.1), betas=lambda t: (0.5, 0.9)))
    assert_same(steps(rule, params), steps(chain(clip_by_norm(1.0), adam(0.1, betas=(0.5, 0.9))), params))


def test_schedules_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match=r"SGDRule has no hyperparameter of that name, it has \['lr'"):
        schedule(sgd(0.1), beta=lambda t: t)
    with pytest.raises(ValueError, match=r"Chain has no hyperparameter of that name.*schedule the rule"):
        schedule(chain(sgd(0.1)), lr=lambda t: t)
    with pytest.raises(TypeError, match=r"schedule\(rule, ...\): .* a functional optimizer.*got "):
        schedule(0.1, lr=lambda t: t)
    rule = schedule(sgd(0.1), lr=lambda t: 0.1 - t)
    with pytest.raises(ValueError, match=r"sgd\(...\): lr must be at least 0, got -0.9"):
        steps(rule, draw(SHAPES))
