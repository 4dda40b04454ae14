"""Training loops as people write them."""

import functools
import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from metagrad.optim import AdaHessian, GaussNewton
from tests.optim.torch_optim.cases import (
    assert_equal,
    assert_near,
    backward,
    batch,
    classification,
    closure_of,
    every,
    having,
    lacking,
    layer,
    network,
    of_cases,
    optimizer,
    run,
    snapshot,
    tensors_of,
    traits,
)

F64 = torch.float64
takes_gradients = of_cases(
    lambda case: case.traits & traits("told", "one vector")
)  # without torch's backward, in closures


def after(case, loop, **options):
    model = network(F64)
    opt = optimizer(case, model, **options)
    for _ in range(2 if "one vector" in case.traits else 4):
        loop(model, opt)
    return snapshot(model)


def by_closure(model, opt):
    opt.step(closure_of(opt, classification(model, F64)))


_expected = {}


def expected_of(case):
    """Return the parameters after steps by plain closures, which several tests compare with."""
    if str(case) not in _expected:
        _expected[str(case)] = after(case, by_closure)
    return _expected[str(case)]


@of_cases(lambda case: case.by_hand)
def test_without_a_closure_what_looks_at_the_loss_again_is_refused(case):
    model = network()
    opt = optimizer(case, model)
    before = snapshot(model)
    backward(case, opt, classification(model))
    option = next(iter(case.by_hand))
    match = rf"{case.name}.step: {option}=.* Call opt.step\(closure\), or set {option}={case.by_hand[option]}"
    with pytest.raises(RuntimeError, match=match):
        opt.step()
    assert_equal(snapshot(model), before)
    opt.zero_grad()
    run(opt, classification(model), 1)


@having("known loss")
def test_a_loss_that_is_not_noted_is_refused(case):
    opt = optimizer(case, model := network())
    with pytest.raises(ValueError, match=r"the loss contains none.*within `with opt.recording\(\):`"):
        opt.backward(classification(model)())


@having("known loss")
def test_a_loss_of_unknown_form_is_refused(case):
    model = network()
    x, y = batch()
    opt = optimizer(case, model)
    for loss_of in (lambda z: z.square().mean(), lambda z: F.cross_entropy(z, y, reduction="none").mean()):
        with pytest.raises(ValueError, match=rf"{case.name}.*: the loss contains none.*F\.cross_entropy"):
            run(opt, lambda loss_of=loss_of: loss_of(model(x)), 1)
    run(opt, classification(model), 1)


@of_cases(lambda case: case.name in ("Lion", "AdaHessian", "NewtonCG"))
@pytest.mark.parametrize("is_differentiated", [True, False])
def test_a_closure_of_a_complex_loss_is_refused(case, is_differentiated):
    model = network()
    opt = optimizer(case, model)

    def closure():
        opt.zero_grad()
        real = classification(model)()
        loss = torch.complex(real, real.detach())
        if is_differentiated:
            loss.backward(torch.ones_like(loss))
        else:
            real.backward()
        return loss

    words = rf"{case.name}\.(step\(closure\)|backward\(loss\)): the loss must be real, got torch.complex64"
    with pytest.raises(ValueError, match=words):
        opt.step(closure)
    assert_equal(snapshot(model), snapshot(network()))
    run(opt, classification(model), 1)


@every
def test_forms_of_a_closure(case):
    nothing = () if "calls again" in case.traits else ("nothing",)
    for form in ("autograd_mean", "function", "keeps", "number", *nothing):
        assert_near(after(case, loop_by(form)), expected_of(case))


@of_cases(lambda case: case.traits & {"told", "model", "calls again"})
def test_a_closure_whose_loss_was_computed_outside_of_it_is_refused(case):
    for is_differentiated in (True, False) if "one vector" in case.traits else (True,):
        model = network()
        opt = optimizer(case, model)
        with opt.recording():
            loss = classification(model)()
            loss.backward(retain_graph=True)

        def closure(loss=loss, is_differentiated=is_differentiated):
            if is_differentiated:
                loss.backward()
            return loss

        # The graph is freed after a step, which torch reports by itself.
        reasons = "anew at every call|no curvature|inside the closure|call it every time|second time"
        with pytest.raises((RuntimeError, ValueError), match=reasons):
            [opt.step(closure) for _ in range(2)]


def test_a_closure_without_a_backward_pass_is_warned_of():
    model = torch.nn.Linear(2, 1)
    opt = AdaHessian(model.parameters())
    with pytest.warns(UserWarning, match=r"^AdaHessian\.step\(closure\): no parameter has a gradient"):
        opt.step(lambda: model(torch.ones(1, 2)).sum())


def loop_by(form):
    def loop(model, opt):
        def closure():
            model.zero_grad()
            loss = classification(model, F64)()
            if form == "autograd_mean":
                loss.reshape(1).backward(torch.ones(1, dtype=F64))
            elif form == "function":
                torch.Tensor.backward(loss, None, False)
            else:
                loss.backward(inputs=list(model.parameters()) if form == "keeps" else None)
            return {"number": loss.item(), "nothing": None}.get(form, loss)

        loss = opt.step(closure)
        assert {"number": float, "nothing": type(None)}.get(form, torch.Tensor) is type(loss)

    return loop


def twice(model, opt):
    def closure():
        opt.zero_grad()
        loss = classification(model, F64)()
        (0.25 * loss).backward(retain_graph=True)
        (0.75 * loss).backward()
        return loss

    opt.step(closure)


def micro_batches(model, opt, *, at_once=False):
    x, y = batch(F64)

    def closure():
        opt.zero_grad()
        losses = (F.cross_entropy(model(x[i : i + 4]), y[i : i + 4]) / 3 for i in (0, 4, 8))
        total = 0
        for loss in list(losses) if at_once else losses:
            loss.backward()
            total = total + loss
        return total

    opt.step(closure)


@lacking("drawn labels")
def test_backward_passes_add_up(case):
    at_once = () if "model" in case.traits else (functools.partial(micro_batches, at_once=True),)
    for loop in (twice, micro_batches, *at_once):
        assert_near(after(case, loop), expected_of(case))


@having("drawn labels")
def test_gradients_of_backward_passes_add_up(case):
    """Each pass draws its own labels, so the curvature is another sample."""
    for loop in (twice, micro_batches):
        gradients = []
        for one in (loop, by_closure):
            model = network(F64)
            one(model, optimizer(case, model))
            gradients.append([p.grad for p in model.parameters()])
        assert_near(*gradients)
        assert all(p.isfinite().all() for p in after(case, loop))


@having("known loss")
def test_a_loss_that_is_divided_in_place_is_as_one_divided(case):
    def by(divide):
        def loss_of(model):
            x, y = batch(F64)
            output = model(x)
            with torch.no_grad():
                F.mse_loss(output, output)  # a metric is no part of the loss
            return divide(F.cross_entropy(output, y))

        return after(case, lambda model, opt: opt.step(closure_of(opt, lambda: loss_of(model))))

    assert_near(by(lambda loss: loss.div_(4)), by(lambda loss: loss / 4))


@every
def test_maximize_climbs_as_minimizing_the_negative_descends(case):
    def climbing(model, opt):
        opt.step(closure_of(opt, lambda: -classification(model, F64)()))

    assert_near(after(case, climbing, maximize=True), expected_of(case))


@every
def test_what_is_done_to_gradients_before_a_step_counts(case):
    model = network()
    opt = optimizer(case, model, **case.by_hand)
    for _ in range(3):
        opt.zero_grad()
        backward(case, opt, classification(model))
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert nn.utils.get_total_norm([p.grad for p in model.parameters()]) < 1.001e-3
        opt.step()
    twin = network()
    opt = optimizer(case, twin, **case.by_hand)
    backward(case, opt, classification(twin))
    for p in twin.parameters():
        p.grad.zero_()
    opt.step()
    assert_equal(snapshot(twin), snapshot(network()))


def test_schedulers_of_other_hyperparameters():
    model = network()
    opt = AdaHessian(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10, base_momentum=0.5)
    run(opt, classification(model), 1)
    scheduler.step()
    assert 0.5 <= opt.param_groups[0]["betas"][0] < 0.95
    opt.param_groups[0]["hessian_power"] = -1.0
    with pytest.raises(ValueError, match="hessian_power must be at least 0"):
        run(opt, classification(model), 1)


@lacking("calls again")
def test_hooks(case):
    model, seen = network(), []
    opt = optimizer(case, model)
    opt.register_step_pre_hook(lambda opt, args, kwargs: seen.append("before"))
    opt.register_step_post_hook(lambda opt, args, kwargs: seen.append("after"))
    opt.register_load_state_dict_post_hook(lambda opt: seen.append(opt.state[model.first.weight]["step"]))
    model.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    run(opt, classification(model), 1)
    opt.load_state_dict(opt.state_dict())
    assert seen == ["before", "accumulated", "after", 1]


@of_cases(lambda case: "told" in case.traits)
def test_a_closure_that_keeps_the_graph_itself_leaves_none_behind(case):
    """Loops written for other implementations say create_graph=True, which leaks where .grad holds the graph."""

    def loop(model, opt):
        def closure():
            opt.zero_grad()
            loss = classification(model, F64)()
            loss.backward(create_graph=True)
            assert not any(p.grad.requires_grad for p in model.parameters() if p.grad is not None)
            return loss

        opt.step(closure)

    # Between two estimates, backward is torch's own, which warns.
    options = {"curvature_every": 1} if "curvature_every" in case.network else {}
    assert_near(after(case, loop, **options), after(case, by_closure, **options))


@lacking("calls again")
def test_leaves_of_others_get_their_gradients(case):
    """A closure's backward writes every .grad that it would write without the optimizer."""
    model = network()
    x, y = batch()
    x.requires_grad_()
    opt = optimizer(case, model.second)
    run(opt, lambda: F.cross_entropy(model(x), y), 1)
    other = network()
    expected = batch()[0].requires_grad_()
    F.cross_entropy(other(expected), y).backward()
    torch.testing.assert_close(x.grad, expected.grad)
    torch.testing.assert_close(model.first.weight.grad, other.first.weight.grad)
    assert not any(t.grad.requires_grad for t in (x, *model.parameters()))


@takes_gradients
def test_gradients_of_two_parameters_are_two_tensors(case):
    """Autograd gives the same tensor to both operands of a sum. Clipping in place must not clip it twice."""
    a, b = layer(1.0, 1.0), layer(1.0, 1.0)
    opt = optimizer(case, nn.ModuleList([a, b]))
    with opt.recording():
        F.mse_loss(a.weight + b.weight + 0 * a(torch.ones(2)), torch.zeros(1, 2)).backward()
    assert a.weight.grad.data_ptr() != b.weight.grad.data_ptr()


@having("told")
def test_a_step_without_curvature_is_refused(case):
    model = network()
    opt = optimizer(case, model, **case.by_hand)
    with opt.recording():
        classification(model)().backward()
    opt.zero_grad()  # takes the curvature along
    classification(model)().backward()
    with pytest.raises(RuntimeError, match=rf"{case.name}.step: .*no curvature.*opt\.(backward|recording)"):
        opt.step()
    opt.zero_grad()
    run(opt, classification(model), 1)


@having("twice")
def test_a_defect_of_the_graph_is_refused(case):
    table = nn.Embedding(3, 2, scale_grad_by_freq=True)
    opt = optimizer(case, table)
    with pytest.raises(ValueError, match=rf"{case.name}.backward\(loss\): .*scale_grad_by_freq"):
        opt.backward(table(torch.tensor([0, 0, 2])).pow(2).sum())


# Memory ----------------------------------------------------------------------------------------------------


def watched(model):
    """Remember what every layer returns, weakly."""
    seen = []
    for module in model.modules():
        module.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
    return seen


@every
def test_no_graph_outlives_a_step(case):
    model = network()
    seen = watched(model)
    opt = optimizer(case, model)
    gc.disable()
    try:
        closures = [closure_of(opt, classification(model)) for _ in range(3)]
        seen += map(weakref.ref, closures)
        kept = [opt.step(closures.pop()) for _ in range(3)]
        assert len(seen) > 3
        assert not [ref for ref in seen if ref() is not None]
        assert all(loss.grad_fn is None for loss in kept)
    finally:
        gc.enable()


@every
def test_no_graph_outlives_an_exception(case):
    model = network()
    seen = watched(model)
    opt = optimizer(case, model)

    def closure():
        classification(model)().backward()
        raise KeyError("of the program")

    gc.disable()
    try:
        with pytest.raises(KeyError) as caught:
            opt.step(closure)
        del caught
        assert not [ref for ref in seen if ref() is not None]
    finally:
        gc.enable()
    assert torch._C._len_torch_function_stack() == 0
    run(opt, classification(model), 1)


def test_an_exception_in_the_closure_of_a_part_leaves_nothing_behind():
    def ends(fails):
        model = network(F64)
        opt = GaussNewton(model.parameters())

        def closure():
            loss = classification(model, F64)()
            loss.backward()
            return loss

        if fails:
            with pytest.raises(KeyError):
                opt.step(closure, curvature=lambda: {}["part"])
            for p in model.parameters():
                p.grad.zero_()
        opt.step(closure)
        return snapshot(model)

    assert_equal(ends(True), ends(False))


def test_backward_frees_the_graph_that_a_loop_holds():
    """As in a loop of torch's, where the loss of the last step is alive while the next is computed."""
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    alive = []
    x, y = batch()

    def pack(tensor):
        holder = [tensor]
        alive.append(weakref.ref(tensor))
        return holder

    opt = AdaHessian(model.parameters())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder[0]):
        loss = F.cross_entropy(model(x), y)
    opt.backward(loss)
    params = {p.data_ptr() for p in model.parameters()} | {x.data_ptr(), y.data_ptr()}
    left = [t for ref in alive if (t := ref()) is not None and t.data_ptr() not in params]
    assert (
        sum(t.nbytes for t in left) <= 2 * 12 * 3 * 4 + 16
    )  # size of the loss itself. A hidden layer is 12 * 64 * 4
    assert loss.grad_fn is not None


# Mixed precision -------------------------------------------------------------------------------------------


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


def scaled_step(case, model, opt, scale, *, unscale=False, told=False):
    opt.zero_grad()
    loss_of = classification(model, F64)
    if told:
        with opt.recording():
            opt.backward(loss_of(), scaler=scale)
    else:
        backward(case, opt, lambda: scale.scale(loss_of()))
    if unscale:
        scale.unscale_(opt)
    scale.step(opt)
    scale.update()


@every
def test_grad_scaler_unscaled_before(case):
    scale = scaler()

    def loop(model, opt):
        scaled_step(case, model, opt, scale, unscale=True, told="backward" in case.traits)

    assert_near(after(case, loop, **case.by_hand), after(case, by_closure, **case.by_hand))


@of_cases(lambda case: case.traits & traits("told", "model"))  # others use only gradients
def test_grad_scaler_unscaled_before_without_being_told_is_refused(case):
    model = network(F64)
    opt = optimizer(case, model, **case.by_hand)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=rf"{case.name}.step: .*backward\(loss, scaler=scaler\)"):
        scaled_step(case, model, opt, scaler(), unscale=True)
    assert_equal(before, snapshot(model))


@every
def test_grad_scaler_skips_a_step_that_overflows(case):
    model = network(F64)
    opt = optimizer(case, model, **case.by_hand)
    scale = scaler()
    scaled_step(case, model, opt, scale)
    before, state, steps = snapshot(model), tensors_of(opt), opt.param_groups[0]["step"]
    opt.zero_grad()
    backward(case, opt, lambda: scale.scale(classification(model, F64)()))
    model.first.weight.grad[0, 0] = math.inf
    scale.step(opt)
    scale.update()
    assert scale.get_scale() == 512.0
    assert_equal(before, snapshot(model))
    assert_equal(state, tensors_of(opt))
    assert opt.param_groups[0]["step"] == steps
    scaled_step(case, model, opt, scale)
    assert all(p.isfinite().all() for p in model.parameters())


def test_curvature_that_overflows_alone_skips_the_step_with_a_warning():
    w = torch.full((1, 2), 1e-3, requires_grad=True)
    opt = AdaHessian([w], lr=0.1)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    opt.backward(scale.scale((1e17 * w).sin().sum()))
    with pytest.warns(UserWarning, match=r"AdaHessian.step: .*curvature has overflowed.*init_scale"):
        scale.step(opt)
    assert w.tolist() == [[pytest.approx(1e-3)] * 2]
    assert w not in opt.state


@having("backward")
def test_grad_scaler_takes_no_closure(case):
    model = network()
    opt = optimizer(case, model)
    run(opt, classification(model), 1)
    scale = scaler()
    scale.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match=rf"{case.name}.step\(closure\): GradScaler takes no closure"):
        scale.step(opt, closure_of(opt, classification(model)))
