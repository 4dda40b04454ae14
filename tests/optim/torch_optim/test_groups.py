"""Optimizers that share their matrices over processes move as one process does; the processes are threads."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from metagrad.core.tree import tree_leaves
from metagrad.distributed import GradientAverager, average_gradients
from metagrad.distributed.shares import of_matrices, shares
from metagrad.optim import (
    KFAC,
    LBFGS,
    AdaHessian,
    CubicNewton,
    GaussNewton,
    NaturalGradient,
    NewtonCG,
    Shampoo,
    SophiaG,
    SophiaH,
    TrustRegionNewton,
    rules,
)
from metagrad.optim.kronecker import factors, shampoo
from metagrad.tasks.batch import share_of
from tests.distributed.threads import in_threads
from tests.marks import combined, fast

OPTIMIZERS = {
    "Shampoo": lambda model, **group: Shampoo(
        model.parameters(), lr=0.05, root_every=2, block_size=5, **group
    ),
    "Shampoo of adam": lambda model, **group: Shampoo(
        model.parameters(), lr=0.05, graft="adam", decay=0.9, **group
    ),
    "AdaHessian": lambda model, **group: AdaHessian(model.parameters(), lr=0.05, seed=0, **group),
    "SophiaH": lambda model, **group: SophiaH(
        model.parameters(), lr=0.05, curvature_every=2, seed=0, **group
    ),
    "KFAC": lambda model, **group: KFAC(model, lr=0.05, curvature_every=1, inverse_every=2, **group),
    "EKFAC": lambda model, **group: KFAC(model, eigen=True, curvature_every=1, inverse_every=2, **group),
    "NewtonCG": lambda model, **group: NewtonCG(model.parameters(), adapt=False, damping=2.0, **group),
    "TrustRegionNewton": lambda model, **group: TrustRegionNewton(model.parameters(), adapt=False, **group),
}


def network():
    layers = (
        nn.Conv2d(1, 3, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 4),
        nn.Tanh(),
        nn.Linear(4, 2, bias=False),
    )
    return nn.Sequential(*layers).double()


def trained(model, opt, x, y, group=None, steps=4):
    """Take steps, and return parameters and the tensors of the state."""
    for _ in range(steps):
        opt.zero_grad()
        getattr(opt, "backward", torch.Tensor.backward)(F.mse_loss(model(x), y))
        if group is not None:
            average_gradients(model, weight=len(x), group=group)
        opt.step()
    state = [leaf for leaf in tree_leaves(opt.state_dict()["state"]) if isinstance(leaf, torch.Tensor)]
    return [p.detach() for p in model.parameters()], state


@pytest.mark.parametrize(
    ("name", "size"),
    combined(OPTIMIZERS, [2, 3], fast=lambda name, size: size == 2 or name in ("Shampoo", "EKFAC")),
)
def test_steps_of_uneven_shares_are_those_of_one_process(name, size):
    whole, (x, y) = network(), (torch.randn(41, 1, 3, 3).double(), torch.randn(41, 2).double())
    make, models = OPTIMIZERS[name], [copy.deepcopy(whole) for _ in range(size)]

    def process(group):
        model, part = models[group.rank()], share_of(41, group.rank(), size)
        return trained(model, make(model, group=group), x[part], y[part], group)

    found = in_threads(size, process)
    expected = trained(whole, make(whole), x, y)
    for params, state in found:
        torch.testing.assert_close(params, expected[0], rtol=1e-9, atol=1e-12)
        if name != "EKFAC":  # whose eigenvectors may turn where eigenvalues are equal
            torch.testing.assert_close(state, expected[1], rtol=1e-8, atol=1e-10)
        assert all(map(torch.equal, state, found[0][1]))  # the same bits in every process
        assert all(map(torch.equal, params, found[0][0]))


def closure_of(model, opt, x, y, group=None):
    """Return a closure that averages its gradients, in place of what an optimizer does without one."""

    def closure():
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        average_gradients(model, weight=len(x), group=group)
        return loss

    return closure


def test_labels_are_drawn_in_each_process_and_their_curvature_is_averaged():
    """Of half squared errors and inputs of 1 the Gauss-Newton matrix is 1, whatever the shares are."""
    shares = 500, 2500

    def process(group):
        model = nn.Linear(1, 1, bias=False).double()
        with torch.no_grad():
            model.weight.fill_(0.5)
        opt = SophiaG(model.parameters(), betas=(0.9, 0.0), curvature_every=1, seed=3, group=group)
        x = torch.ones(shares[group.rank()], 1).double()
        found = []
        for _ in range(100):
            with opt.recording():
                (F.mse_loss(model(x), x) / 2).backward()
            own = opt._estimates[model.weight].item()
            average_gradients(model, weight=len(x), group=group)
            opt.step()
            found.append((own, opt.state[model.weight]["hessian"].item()))
            opt.zero_grad()
        return torch.tensor(found)

    one, other = in_threads(2, process)
    torch.testing.assert_close(one[:, 1], (500 * one[:, 0] + 2500 * other[:, 0]) / 3000)
    assert torch.equal(one[:, 1], other[:, 1])
    assert not torch.equal(one[:, 0], other[:, 0])
    assert one[:, 1].mean().item() == pytest.approx(1, abs=0.5)  # of a deviation of 0.12


@pytest.mark.parametrize("make", [AdaHessian, SophiaG, SophiaH, NewtonCG, LBFGS, KFAC])
def test_averaged_gradients_beside_the_curvature_of_one_process_are_refused(make):
    """Every process would move in its own way, and none would say so."""
    x, y = torch.randn(4, 1, 3, 3).double(), torch.randn(4, 2).double()
    models = [network() for _ in range(2)]

    def process(group):
        model = models[group.rank()]
        opt = make(model if make is KFAC else model.parameters())
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=f"{make.__name__}.step: the gradients are means over several"):
            opt.step(closure_of(model, opt, x, y, group))
        assert all(map(torch.equal, before.values(), model.state_dict().values()))

    in_threads(2, process)


@pytest.mark.parametrize("make", [AdaHessian, SophiaG, NewtonCG, LBFGS, KFAC])
def test_a_wrapper_that_averages_gradients_by_itself_is_refused(make):
    """No gradient that these optimizers take reaches it, or no factor, and processes drifted apart in silence."""
    x, y, (group,) = torch.randn(4, 2), torch.randn(4, 1), in_threads(1, lambda group: group)
    model = nn.Linear(2, 1)
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    opt = make(model if make is KFAC else model.parameters())

    def closure():
        opt.zero_grad()
        loss = F.mse_loss(wrapped(x), y)
        loss.backward()
        return loss

    with pytest.raises(ValueError, match="DistributedDataParallel"):
        opt.step(closure)
    with wrapped.no_sync():
        opt.step(closure)


def test_lbfgs_without_a_closure_takes_averaged_gradients():
    model, (x, y) = network(), (torch.randn(6, 1, 3, 3).double(), torch.randn(6, 2).double())
    models = [copy.deepcopy(model) for _ in range(2)]

    def process(group):
        own, part = models[group.rank()], share_of(6, group.rank(), 2)
        return trained(own, LBFGS(own.parameters(), lr=0.1, line_search_fn=None), x[part], y[part], group)[0]

    expected = trained(model, LBFGS(model.parameters(), lr=0.1, line_search_fn=None), x, y)[0]
    for found in in_threads(2, process):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_process_without_examples_takes_the_curvature_of_the_others():
    model, (x, y) = network(), (torch.randn(6, 1, 3, 3).double(), torch.randn(6, 2).double())
    models = [copy.deepcopy(model) for _ in range(2)]

    def process(group):
        own = models[group.rank()]
        opt = OPTIMIZERS["AdaHessian"](own, group=group)
        if not group.rank():
            opt.backward(F.mse_loss(own(x), y))
        average_gradients(own, weight=float(not group.rank()), group=group)
        opt.step()
        return [p.detach() for p in own.parameters()]

    expected = trained(model, OPTIMIZERS["AdaHessian"](model), x, y, steps=1)[0]
    for found in in_threads(2, process):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("make", [AdaHessian, Shampoo])
def test_sharded_parameters_are_refused(make):
    w = torch.zeros(2, 2, requires_grad=True)
    w.device_mesh = "as a DTensor has"
    with pytest.raises(ValueError, match=rf"{make.__name__}\(params\): the parameter 'w' is a DTensor"):
        make([("w", w)])


@pytest.mark.parametrize("name", ["AdaHessian", "Shampoo", "KFAC", "NewtonCG"])
@pytest.mark.parametrize("what", ["parameters", "gradients"])
def test_processes_that_would_drift_apart_are_refused(name, what):
    x, y = torch.randn(4, 1, 3, 3).double(), torch.randn(4, 2).double()
    models = [network() for _ in range(2)]
    if what == "gradients":
        models[1].load_state_dict(models[0].state_dict())

    def process(group):
        rank = group.rank()
        opt = OPTIMIZERS[name](models[rank], group=group)
        getattr(opt, "backward", torch.Tensor.backward)(F.mse_loss(models[rank](x[rank:]), y[rank:]))
        if what == "parameters":
            average_gradients(models[rank], group=group)
        same = "parameters and their gradients must be the same"
        with pytest.raises(ValueError, match=rf"{name}.step: ({same}|.* was not averaged by metagrad)"):
            opt.step()

    in_threads(2, process)


@pytest.mark.parametrize(
    ("name", "module"),
    [("Shampoo", shampoo), ("KFAC", factors)],
)
def test_each_process_computes_a_share(name, module):
    counted, model = Counter(), network()
    models = [copy.deepcopy(model) for _ in range(2)]
    x, y = torch.randn(4, 1, 3, 3).double(), torch.randn(4, 2).double()

    def noted(call, compute, matrices, group):
        def counting(numbers):
            counted[group.rank()] += len(numbers)
            counted["all"] = len(matrices)
            return compute(numbers)

        return of_matrices(call, counting, matrices, group)

    def process(group):
        model = models[group.rank()]
        trained(model, OPTIMIZERS[name](model, group=group), x, y, group, steps=1)

    with mock.patch.object(module, "of_matrices", noted):
        in_threads(2, process)
    assert counted[0] + counted[1] == counted["all"] > 2
    assert min(counted[0], counted[1]) > 0


@pytest.mark.parametrize("shares", [(1500, 1500), (500, 2500)])
def test_factors_of_labels_that_are_drawn_have_the_scale_of_the_whole(shares):
    """Of half squared errors G is 1; every process draws other labels for the same inputs."""
    model = nn.Linear(1, 1, bias=False).double()
    models = [copy.deepcopy(model) for _ in range(2)]

    def process(group):
        own, x = models[group.rank()], torch.ones(shares[group.rank()], 1).double()
        opt = KFAC(own, fisher="sampled", seed=3, group=group)
        with opt.recording():
            (F.mse_loss(own(x), x) / 2).backward()
        average_gradients(own, weight=len(x), group=group)
        gradients = torch.cat([g for _, g in opt._rows("weight")]) if opt._calls else None
        opt.step()
        return opt.state[own.weight]["outputs"].item(), opt.state[own.weight]["inputs"].item(), gradients

    (one, inputs, drawn), (other, _, others) = in_threads(2, process)
    assert one == other == pytest.approx(1, rel=0.15)
    assert inputs == 1
    assert not torch.equal(drawn.flatten()[:500].sign(), others.flatten()[:500].sign())


def singular(group, nonfinite):
    """Return a K-FAC whose only layer has a factor of outputs of zeros, and no damping."""
    model = nn.Linear(2, 3, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.ones(3, 2))
    opt = KFAC(model, damping=0.0, nonfinite=nonfinite, group=group)
    model(torch.eye(2).double()).mul(0).sum().backward()
    return model, opt


def test_a_matrix_that_one_process_cannot_factorise_is_an_error_in_all():
    torch.manual_seed(0)

    def process(group):
        _, opt = singular(group, "raise")
        with pytest.raises(torch.linalg.LinAlgError) as caught:
            opt.step()
        return str(caught.value)

    said = in_threads(2, process)
    assert any("could not be factorised in process" in each for each in said)
    assert any("could not be factorised in process" not in each for each in said)


def test_a_step_is_left_out_in_all_processes():
    def process(group):
        model, opt = singular(group, "skip")
        opt.step()
        return opt.stats["skipped"], model.weight.tolist()

    assert in_threads(2, process) == [(1, [[1.0, 1.0]] * 3)] * 2


def test_a_loss_that_is_not_finite_in_one_process_is_an_error_in_all():
    def process(group):
        w = torch.ones(2, 2, requires_grad=True)
        opt = Shampoo([w], group=group)

        def closure():
            w.grad = torch.ones(2, 2)
            return torch.tensor(float("nan") if group.rank() else 1.0)

        with pytest.raises(FloatingPointError) as caught:
            opt.step(closure)
        return str(caught.value).partition(" is NaN")[0], w.tolist()

    same = [[1.0, 1.0], [1.0, 1.0]]
    elsewhere = "Shampoo.step: something in another process of the group"
    assert in_threads(2, process) == [(elsewhere, same), ("Shampoo.step: the loss", same)]


def test_an_optimizer_of_a_group_is_saved_by_its_state_alone():
    def process(group):
        w = torch.ones(2, 3, requires_grad=True)
        opt, again = Shampoo([w], group=group), Shampoo([w], group=group)
        w.grad = torch.ones(2, 3)
        opt.step()
        again.load_state_dict(opt.state_dict())
        for copies in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="with a process group is neither copied nor pickled"):
                copies(opt)
        assert "group" not in opt.param_groups[0]
        return again.state[w]["step"]

    assert in_threads(2, process) == [1, 1]


def test_one_process_has_no_group():
    (opt,) = in_threads(1, lambda group: Shampoo([torch.ones(2, 2, requires_grad=True)], group=group))
    assert opt.group is None
    assert Shampoo([torch.ones(2, requires_grad=True)]).group is None


def test_roots_that_others_compute_have_no_derivative():
    def process(group):
        rule = rules.shampoo(lr=0.1, group=group)
        w = torch.ones(2, 2, requires_grad=True)
        with pytest.raises(
            ValueError, match=r"shampoo\(...\).update: what other processes compute has no graph"
        ):
            rule.update({"w": w * w}, rule.init({"w": w}), {"w": w})

    in_threads(2, process)


# Those that compute the loss again

SOLVER = {"damping": 0.1, "max_steps": 6}  # more steps of conjugate gradients would multiply rounding
NEWTON = {
    "NewtonCG": (NewtonCG, SOLVER),
    "NewtonCG, preconditioned": (
        NewtonCG,
        {**SOLVER, "preconditioner": "diagonal", "samples": 2, "curvature_every": 2, "seed": 0},
    ),
    "GaussNewton": (GaussNewton, SOLVER),
    "NaturalGradient": (NaturalGradient, {**SOLVER, "max_divergence": 0.1}),
    "CubicNewton": (CubicNewton, {}),
    "TrustRegionNewton": (TrustRegionNewton, {"weight_decay": 0.01}),
    "LBFGS": (LBFGS, {"max_iter": 3}),
}


def stepped(make, options, model, data, group=None, steps=3, loss_fn=F.mse_loss, part=None):
    """Take steps by a closure, and return parameters, tensors of the state and what was said of each step."""

    def closure_of(x, y):
        def closure():
            opt.zero_grad()
            loss = loss_fn(model(x), y) if len(x) else torch.zeros(())
            if len(x):
                loss.backward()
            if group is not None:
                average_gradients(model, weight=len(x), group=group)
            return loss

        return closure

    opt, said = make(model.parameters(), **options, group=group), []
    for _ in range(steps):
        curved = {} if part is None else {"curvature": closure_of(*part)}
        opt.step(closure_of(*data), **curved)
        said.append(str(opt.stats))
    state = [leaf for leaf in tree_leaves(opt.state_dict()["state"]) if isinstance(leaf, torch.Tensor)]
    return [p.detach() for p in model.parameters()], state, said


def assert_all_equal(found):
    """Assert that all processes have the same bits, and say the same."""
    for params, state, said in found:
        assert all(map(torch.equal, params, found[0][0]))
        assert all(map(torch.equal, state, found[0][1]))
        assert said == found[0][2]


@pytest.mark.parametrize(
    ("name", "size"),
    combined(NEWTON, [2, 3], fast=lambda name, size: size == 2 or name == "NewtonCG, preconditioned"),
)
def test_newton_steps_of_uneven_shares_are_those_of_one_process(name, size):
    """Lengths, dampings, radii and regularisations follow the mean of the losses, and so do line searches."""
    whole, (x, y) = network(), (torch.randn(41, 1, 3, 3).double(), torch.randn(41, 2).double())
    (make, options), models = NEWTON[name], [copy.deepcopy(whole) for _ in range(size)]

    def process(group):
        part = share_of(41, group.rank(), size)
        return stepped(make, options, models[group.rank()], (x[part], y[part]), group)

    found, expected = in_threads(size, process), stepped(make, options, whole, (x, y))
    assert_all_equal(found)
    torch.testing.assert_close(found[0][0], expected[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["NewtonCG", "GaussNewton"])
def test_the_curvature_of_a_part_has_weights_of_its_own(name):
    """Here that of examples of the first process alone, and the others do not even call backward."""
    whole, (x, y) = network(), (torch.randn(12, 1, 3, 3).double(), torch.randn(12, 2).double())
    (make, options), models = NEWTON[name], [copy.deepcopy(whole) for _ in range(2)]

    def process(group):
        share, part = share_of(12, group.rank(), 2), slice(0, 0 if group.rank() else 5)
        data = x[share], y[share]
        return stepped(make, options, models[group.rank()], data, group, part=(x[part], y[part]))

    found = in_threads(2, process)
    expected = stepped(make, options, whole, (x, y), part=(x[:5], y[:5]))
    assert_all_equal(found)
    torch.testing.assert_close(found[0][0], expected[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", fast(("NewtonCG, preconditioned", "CubicNewton", "LBFGS"), NEWTON))
def test_a_process_without_examples_takes_the_newton_steps_of_the_others(name):
    whole, (x, y) = network(), (torch.randn(6, 1, 3, 3).double(), torch.randn(6, 2).double())
    (make, options), models = NEWTON[name], [copy.deepcopy(whole) for _ in range(2)]

    def process(group):
        part = slice(0, 0 if group.rank() else 6)
        return stepped(make, options, models[group.rank()], (x[part], y[part]), group, steps=2)

    found, expected = in_threads(2, process), stepped(make, options, whole, (x, y), steps=2)
    assert_all_equal(found)
    torch.testing.assert_close(found[0][0], expected[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("make", [NewtonCG, NaturalGradient])
def test_preconditioners_are_means_of_what_each_process_draws(make):
    """The probes of processes with other seeds, and labels, differ; parameters do not."""
    models, options = [network() for _ in range(2)], {"preconditioner": "diagonal", "damping": 0.1}
    models[1].load_state_dict(models[0].state_dict())
    x, y = torch.randn(12, 1, 3, 3).double(), torch.randn(12, 2).double()

    def process(group):
        part, seed = share_of(12, group.rank(), 2), group.rank() if make is NewtonCG else 0
        return stepped(make, {**options, "seed": seed}, models[group.rank()], (x[part], y[part]), group)

    assert_all_equal(in_threads(2, process))


@pytest.mark.parametrize("make", [NewtonCG, LBFGS])
def test_a_loss_that_is_not_finite_elsewhere_in_one_process_shortens_the_steps_of_all(make):
    """Where the logarithm is of a negative number, of the examples of one process."""
    x = [torch.tensor([1.0, 2.0]).double(), torch.tensor([-1.0]).double()]

    def process(group):
        model = nn.Linear(1, 1, bias=False).double()
        with torch.no_grad():
            model.weight.fill_(0.5)
        own = x[group.rank()][:, None]

        def barrier(output, _):
            return 0.1 * output.square().mean() - output.mean() - (1 + 3 * output).log().sum() / 100

        if not group.rank():
            return stepped(
                make, {}, model, (own, own), group, steps=3, loss_fn=lambda z, _: (z - 8).square().mean()
            )
        return stepped(make, {}, model, (own / 4, own), group, steps=3, loss_fn=barrier)

    found = in_threads(2, process)
    assert_all_equal(found)
    assert all(p.isfinite().all() for p in found[0][0])
    assert "'length': 1.0" not in found[0][2][0]


def test_gradients_that_are_averaged_during_the_backward_pass_are_those_of_newtons_steps():
    whole, (x, y) = network(), (torch.randn(12, 1, 3, 3).double(), torch.randn(12, 2).double())
    models = [copy.deepcopy(whole) for _ in range(2)]

    def process(group):
        model, part = models[group.rank()], share_of(12, group.rank(), 2)
        opt, averager = (
            NewtonCG(model.parameters(), **SOLVER, group=group),
            GradientAverager(model, group=group),
        )

        def closure():
            opt.zero_grad()
            loss = F.mse_loss(model(x[part]), y[part])
            with averager.averaging(weight=6):
                loss.backward()
            return loss

        for _ in range(3):
            opt.step(closure)
        return [p.detach() for p in model.parameters()]

    expected = stepped(NewtonCG, SOLVER, whole, (x, y), steps=3)[0]
    for found in in_threads(2, process):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_gradients_of_one_loss_with_several_weights_are_refused():
    x, y = torch.randn(4, 1, 3, 3).double(), torch.randn(4, 2).double()
    models = [network() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def process(group):
        model = models[group.rank()]
        opt = NewtonCG(model.parameters(), group=group)

        def closure():
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            average_gradients(model[0], weight=1 + group.rank(), group=group)
            average_gradients(model[3:], weight=1, group=group)
            return loss

        with pytest.raises(
            ValueError, match=r"NewtonCG.step: all gradients are of one loss, which has one w"
        ):
            opt.step(closure)

    in_threads(2, process)


@pytest.mark.parametrize("group_of", [lambda group: group, lambda group: None])
def test_a_part_without_a_backward_pass_is_refused(group_of):
    x, y = torch.randn(4, 1, 3, 3).double(), torch.randn(4, 2).double()
    models = [network() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def process(group):
        model, group = models[group.rank()], group_of(group)
        opt = NewtonCG(model.parameters(), group=group)

        def closure():
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            if group is not None:
                average_gradients(model, group=group)
            return loss

        with pytest.raises(
            RuntimeError, match=r"NewtonCG.step: the closure that the curvature is taken of calls no"
        ):
            opt.step(closure, curvature=lambda: F.mse_loss(model(x), y))

    in_threads(2, process)


def test_a_part_that_is_not_averaged_is_refused():
    x, y = torch.randn(4, 1, 3, 3).double(), torch.randn(4, 2).double()
    models = [network() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def process(group):
        model = models[group.rank()]
        opt = NewtonCG(model.parameters(), group=group)

        def part():
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        with pytest.raises(ValueError, match="was not averaged by metagrad"):
            opt.step(closure_of(model, opt, x, y, group), curvature=part)

    in_threads(2, process)


# What is shared out


def test_shares_are_near_to_equal():
    costs = [float(number % 7 + 1) for number in range(40)]
    parts = shares(costs, 3)
    assert sorted(number for part in parts for number in part) == list(range(40))
    loads = [sum(costs[number] for number in part) for part in parts]
    assert max(loads) - min(loads) <= 1
    assert shares([1.0], 3) == [[0], [], []]


def test_matrices_of_several_shapes_and_dtypes_come_back_in_their_places():
    matrices = [torch.full((n, n), float(n)) for n in (1, 3, 2)] + [torch.full((2, 4, 4), 4.0).double()]

    def process(group):
        return of_matrices("call", lambda numbers: [matrices[n] * 2 for n in numbers], matrices, group)

    for found in in_threads(3, process):
        for one, matrix in zip(found, matrices, strict=True):
            assert torch.equal(one, 2 * matrix)
            assert one.dtype == matrix.dtype
