"""Invariants of every rule in the table of ``cases.py``."""

import copy
import itertools
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import metagrad as mg
from metagrad.optim.rules import with_batch_ndim
from metagrad.sparse.tables.row_sparse import RowSparse
from metagrad.tasks import Batch, Examples
from tests.joint import joint_gradcheck
from tests.optim.cases import CASES, MATRICES, OF_TORCH, draw, formed, over_cases, scalar

CLIMBING = [name for name, case in CASES.items() if hasattr(case.rule(), "maximize")]


def smooth_rule(case, form=lambda value: value, hyper=None):
    return case.make(**(formed(case.smooth_hyper(), form) if hyper is None else hyper), **case.smooth_flags())


def run(case, rule, params, steps=3, memory="full"):
    def step(state, t):
        current, rule_state = state
        grads = mg.grad(case.loss(current), current, create_graph=True)
        return rule.update(grads, rule_state, current), None

    (last, _), _ = mg.unroll(step, (params, rule.init(params)), steps=steps, memory=memory)
    return last


def tower(loss, leaves):
    """Return the gradient and the gradient of its cubes, which mixes all leaves."""
    first = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
    second = torch.autograd.grad(sum((g**3).sum() for g in first), leaves, materialize_grads=True)
    return [*first, *second]


def leaves_of(*trees):
    return [leaf for leaf in pytree.tree_leaves(trees) if isinstance(leaf, torch.Tensor)]


def assert_same(got, expected, rtol=1e-10, atol=1e-12):
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        if isinstance(b, str):
            assert a == b
        else:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", OF_TORCH.values(), ids=OF_TORCH)
def test_equals_torch_step_for_step(case):
    for dtype, steps in ((torch.float64, 12), (torch.float32, 4)):
        ours, theirs = case.params(dtype), case.params(dtype)
        rule = case.make(**case.hyper, **case.flags, **case.as_counterpart)
        optimizer = case.counterpart(theirs.values(), **case.hyper, **case.flags)
        state = rule.init(ours)
        # In float32 the iterations of muon, in bfloat16, now and then round to the other side.
        coarse = 1e-2 if case.shapes is MATRICES else 1e-4
        rtol, atol = (1e-12, 1e-14) if dtype == torch.float64 else (coarse, coarse)
        for step in range(steps):
            ours, state = rule.update(mg.grad(case.loss(ours), ours), state, ours)
            ours = {k: p.detach().requires_grad_() for k, p in ours.items()}
            optimizer.zero_grad()
            case.loss(theirs).backward()
            optimizer.step()
            assert state.step == step + 1
            assert_same(list(ours.values()), list(theirs.values()), rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", [CASES[n] for n in CLIMBING], ids=CLIMBING)
def test_climbing_is_descending_by_minus_the_gradient(case):
    climbing, descending = case.make(**case.hyper, **case.flags, maximize=True), case.rule()
    params, grads = case.params(), case.grads()
    up = climbing.update(grads, climbing.init(params), params)
    down = descending.update({k: -g for k, g in grads.items()}, descending.init(params), params)
    assert all(torch.equal(a, b) for a, b in zip(leaves_of(up), leaves_of(down), strict=True))


@over_cases
def test_gradcheck_in_gradients_parameters_and_hyperparameters(case):
    def fn(hyper, params, first, second):
        rule = smooth_rule(case, hyper=hyper)
        state = rule.init(params)
        for grads in (first, second):
            params, state = rule.update(grads, state, params)
        return params, state

    inputs = (formed(case.smooth_hyper(), scalar), case.params(), case.grads(seed=1), case.grads(seed=2))
    inputs = pytree.tree_map(lambda leaf: leaf.detach().requires_grad_(), inputs)
    assert joint_gradcheck(fn, inputs, order=3, directions=1, rtol=1e-4)


@over_cases
def test_at_a_gradient_of_zero_derivatives_are_finite_and_equal_to_the_limit(case):
    """higher#125: the derivative of the root at zero made every meta-gradient NaN."""
    directions = case.grads()

    def derivatives(size, orders):
        hyper = formed(case.smooth_hyper(), scalar)
        rule, params, scale = smooth_rule(case, hyper=hyper), case.params(), scalar(size)
        state, current = rule.init(params), params
        for _ in range(2):
            current, state = rule.update({k: scale * d for k, d in directions.items()}, state, current)
        leaves = [scale, *leaves_of(params, hyper)]
        level, levels = sum((p**3).sum() for p in current.values()), []
        for _ in range(orders):
            grads = torch.autograd.grad(level, leaves, create_graph=True, materialize_grads=True)
            levels.append(grads)
            level = sum((g**3).sum() for g in grads)
        return levels

    at_zero, nearly = derivatives(0.0, 3), derivatives(1e-9, 1)
    assert all(g.isfinite().all() for level in at_zero for g in level)
    torch.testing.assert_close(at_zero[0][0], nearly[0][0], rtol=1e-5, atol=1e-5)


@over_cases
def test_stacked_tasks_equal_one_task_after_the_other(case):
    rule = smooth_rule(case)
    stacked_rule = with_batch_ndim(rule, 1)
    params = case.params(tasks=(3,))
    grads = [case.grads(seed=seed, tasks=(3,)) for seed in (1, 2, 3)]
    grads[1] = {
        k: g * torch.tensor([1.0, 0.0, 30.0]).view(3, *[1] * (g.ndim - 1)) for k, g in grads[1].items()
    }

    def steps(rule, params, grads):
        state = rule.init(params)
        for g in grads:
            params, state = rule.update(g, state, params)
        return params

    def task(tree, i):
        return pytree.tree_map(lambda t: t[i], tree)

    together = steps(stacked_rule, params, grads)
    leaves = list(params.values())
    each = [steps(rule, task(params, i), task(grads, i)) for i in range(3)]
    alone = {k: torch.stack([moved[k] for moved in each]) for k in params}
    assert_same(together, alone)  # eigenvectors magnify rounding by the inverse of the gaps
    assert_same(*(tower(sum((p**3).sum() for p in r.values()), leaves) for r in (together, alone)), rtol=1e-9)


@over_cases
def test_memory_changes_nothing(case):
    def derivatives(memory):
        hyper, params = formed(case.smooth_hyper(), scalar), case.params()
        last = run(case, smooth_rule(case, hyper=hyper), params, memory=memory)
        return tower(case.loss(last), leaves_of(params, hyper))

    assert_same(derivatives("step"), derivatives("full"), rtol=1e-7, atol=1e-10)


# The options of a rule are differentiated above. This tests the rule within MAML.
@pytest.mark.parametrize(
    ("name", "task_chunk"),
    [("sgd, nesterov", None), ("adam", 1), ("muon", None), ("shampoo", None), ("soap", 1), ("clip", None)],
)
def test_meta_gradients_equal_finite_differences(name, task_chunk):
    case = CASES[name]
    bias = case.shapes is not MATRICES
    model = nn.Sequential(nn.Linear(2, 3, bias=bias), nn.Tanh(), nn.Linear(3, 2, bias=bias)).double()
    drawn = draw({"sx": (4, 6, 2), "sy": (4, 6, 2), "qx": (4, 5, 2), "qy": (4, 5, 2)})
    batch = Batch(Examples(drawn["sx"], drawn["sy"]), Examples(drawn["qx"], drawn["qy"]))
    maml = mg.MAML(model, F.mse_loss, inner=smooth_rule(case), steps=3, task_chunk=task_chunk)
    start = draw({name: p.shape for name, p in model.named_parameters()})
    directions = draw({name: p.shape for name, p in start.items()}, seed=5)

    def loss_at(distance):
        model.load_state_dict({name: p + distance * directions[name] for name, p in start.items()})
        return maml(batch).loss

    grads = torch.autograd.grad(loss_at(0.0), list(model.parameters()), materialize_grads=True)
    got = sum((g * d).sum() for g, d in zip(grads, directions.values(), strict=True))
    h = 2e-6  # the roots of second moments bend on the scale of eps
    expected = (8 * (loss_at(h) - loss_at(-h)) - (loss_at(2 * h) - loss_at(-2 * h))) / (12 * h)
    torch.testing.assert_close(got, expected.detach(), rtol=1e-6, atol=1e-8)


@over_cases
def test_steps_may_be_counted_by_tensors(case):
    """As in a compiled loop, where a number would be compiled in."""

    def counted(state):
        return pytree.tree_map(lambda leaf: torch.tensor(leaf) if isinstance(leaf, int) else leaf, state)

    forms = [lambda v: v]
    if case.by_step:
        forms.append(lambda v: torch.full((3,), v, dtype=torch.float64))
    for form in forms:
        rule = smooth_rule(case, form)
        params = others = case.params()
        state, other_state = rule.init(params), counted(rule.init(params))
        for seed in (1, 2, 3):
            params, state = rule.update(case.grads(seed=seed), state, params)
            others, other_state = rule.update(case.grads(seed=seed), other_state, others)
        assert_same((others, other_state), (params, counted(state)), rtol=1e-12, atol=1e-14)


@over_cases
def test_forms_of_hyperparameters(case):
    expected = run(case, case.rule(), case.params())
    assert_same(run(case, case.rule(scalar), case.params()), expected)
    if not case.by_step:
        return
    for form in (lambda v: [v] * 3, lambda v: torch.full((3,), v, dtype=torch.float64)):
        assert_same(run(case, case.rule(form), case.params()), expected)
    for form in (lambda v: dict.fromkeys(case.shapes, v), lambda v: {n: scalar(v) for n in case.shapes}):
        hyper = {k: v if k in case.for_all else formed({k: v}, form)[k] for k, v in case.hyper.items()}
        assert_same(run(case, case.make(**hyper, **case.flags), case.params()), expected)
    with_elements = {k: v for k, v in case.hyper.items() if k not in (*case.for_all, *case.no_elements)}
    hyper = formed(with_elements, lambda v: {n: torch.full_like(p, v) for n, p in case.params().items()})
    assert_same(run(case, case.rule(**hyper), case.params()), expected)


@over_cases
def test_dtype_device_and_structure_are_kept(case):
    forms = (lambda v: v, lambda v: scalar(v, torch.float32), scalar)
    for dtype, form in itertools.product((torch.float32, torch.bfloat16), forms):
        rule, params = case.rule(form), case.params(dtype)
        state = rule.init(params)
        for seed in (1, 2):
            new, after = rule.update(case.grads(dtype, seed), state, params)
            for before, now in ((params, new), (state, after)):
                assert pytree.tree_structure(before) == pytree.tree_structure(now)
                for a, b in zip(pytree.tree_leaves(before), pytree.tree_leaves(now), strict=True):
                    assert type(a) is type(b) or isinstance(a, torch.Tensor)
                    if isinstance(a, torch.Tensor):
                        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
                        assert b.isfinite().all()
            # In bfloat16 a short step rounds to none.
            assert dtype == torch.bfloat16 or any(not torch.equal(new[k], params[k]) for k in params)
            params, state = new, after


@over_cases
def test_steps_of_half_precision_are_those_of_float32_rounded(case):
    # In float16, the square of 300 overflows and the square of 1e-4 is zero. Averages stand still in bfloat16.
    for dtype, size in ((torch.float16, 1e-4), (torch.float16, 300.0), (torch.bfloat16, 1.0)):
        rule, params = case.rule(), {key: p.detach() for key, p in case.params(dtype).items()}
        state, wide_state = rule.init(params), rule.init({key: p.float() for key, p in params.items()})
        for seed in range(6):
            grads = {key: (size * g).to(dtype) for key, g in case.grads(seed=seed).items()}
            wide_params, wide_grads = (
                {key: p.float() for key, p in each.items()} for each in (params, grads)
            )
            expected, wide_state = rule.update(wide_grads, wide_state, wide_params)
            params, state = rule.update(grads, state, params)
            for key, p in params.items():
                torch.testing.assert_close(p.float(), expected[key], rtol=torch.finfo(dtype).eps, atol=1e-6)


@over_cases
def test_nothing_is_written_in_place(case):
    rule, params, grads = case.rule(), case.params(), case.grads()
    _, state = rule.update(grads, rule.init(params), params)
    given = (params, grads, state)
    versions = [leaf._version for leaf in leaves_of(given)]
    before = copy.deepcopy(pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, given))
    expected = rule.update(grads, state, params)
    for again in (lambda o: pickle.loads(pickle.dumps(o)), copy.deepcopy):
        got = again(rule).update(grads, state, params)
        assert all(torch.equal(a, b) for a, b in zip(leaves_of(got), leaves_of(expected), strict=True))
    assert [leaf._version for leaf in leaves_of(given)] == versions
    assert all(torch.equal(a, b) for a, b in zip(leaves_of(given), leaves_of(before), strict=True))


@over_cases
def test_negative_hyperparameters_are_refused_by_name(case):
    for name, value in case.hyper.items():
        known = name.removeprefix("other_")
        for bad in (-1.0, float("nan"), [0.1, -0.1], {"w": -1.0}):
            if isinstance(bad, (list, dict)) and not case.by_step:
                continue
            given = (bad, *value[1:]) if isinstance(value, tuple) else bad
            with pytest.raises(ValueError, match=rf"{known}.* must be at least 0, got (-|nan)"):
                case.rule(**{name: given}).init(case.params())


def test_complex_parameters_are_refused_by_name():
    for case in CASES.values():
        params = {**case.params(), "w": case.params()["w"].detach().to(torch.complex128)}
        with pytest.raises(TypeError, match=r"init: 'w' is torch.complex128, and must be real"):
            case.rule().init(params)


def rows_step(rule, table, gradient):
    return rule.update({"w": gradient}, rule.init({"w": table}), {"w": table})[0]["w"]


@pytest.mark.parametrize("name", CLIMBING)
def test_sparse_gradients_are_exact_or_refused_by_name(name):
    rule, table = CASES[name].rule(), draw({"w": (4, 2)})["w"].requires_grad_()
    gradient = RowSparse(torch.tensor([1, 3]), torch.ones(2, 2, dtype=torch.float64), (4, 2))
    dense = rows_step(rule, table, gradient.to_dense())
    if rule.takes_rows:
        torch.testing.assert_close(rows_step(rule, table, gradient), dense)
    else:
        with pytest.raises(TypeError, match=rf"{re.escape(rule.call)}.update: .* of 'w' is RowSparse"):
            rows_step(rule, table, gradient)


@over_cases
def test_parameters_without_elements_are_left_alone(case):
    rule = case.rule()
    shapes = {**case.shapes, "rows": (0, 3), "columns": (3, 0)}
    params, grads = draw(shapes, seed=0), draw(shapes, seed=1)
    state, new = rule.init(params), params
    for _ in range(3):
        new, state = rule.update(grads, state, new)
    assert {key: p.shape for key, p in new.items()} == shapes
    assert all(p.isfinite().all() for p in new.values())
    assert rule.update({}, rule.init({}), {})[0] == {}
    name = next(iter(params))
    with pytest.raises(ValueError, match=rf"update: there is no gradient of '{name}'"):
        rule.update({k: g for k, g in grads.items() if k != name}, state, params)
