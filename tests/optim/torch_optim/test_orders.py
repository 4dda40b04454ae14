"""The order of calls in a loop: every order gives the canonical step, or an error that names the call."""

from __future__ import annotations

import contextlib
import copy
import math

import pytest
import torch
import torch.nn.functional as F

from tests.optim.torch_optim.cases import (
    backward,
    batch,
    closure_of,
    every,
    network,
    optimizer,
    snapshot,
)

F64 = torch.float64


class Loop:
    """A training loop without a closure: a model, an optimizer, and the parts that orders put together."""

    def __init__(self, case):
        self.case, self.model = case, network(F64)
        self.opt = optimizer(case, self.model, **case.by_hand)
        self.x, self.y = batch(F64)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def recording(self):
        is_needed = "known loss" in self.case.traits
        return self.opt.recording() if is_needed else contextlib.nullcontext()

    def loss(self):
        return F.cross_entropy(self.model(self.x), self.y)

    def backward(self, loss_of=None):
        backward(self.case, self.opt, loss_of or self.loss)

    def backward_of(self, loss, **options):
        """Differentiate a loss that was computed before."""
        if "known loss" in self.case.traits or "backward" not in self.case.traits:
            loss.backward(**options)
        else:
            self.opt.backward(loss, **options)

    def saliency(self):
        x = self.x.clone().requires_grad_()
        return torch.autograd.grad(self.model(x)[:, 0].sum(), x)


def canonical(loop):
    loop.opt.zero_grad()
    loop.backward()
    loop.opt.step()


def zero_grad_after_the_forward_pass(loop):
    """The order of Lightning."""
    with loop.recording():
        loss = loop.loss()
        loop.opt.zero_grad()
        loop.backward_of(loss)
    loop.opt.step()


def zero_grad_of_the_model_after_the_forward_pass(loop):
    with loop.recording():
        loss = loop.loss()
        loop.model.zero_grad()
        loop.backward_of(loss)
    loop.opt.step()


def zero_grad_after_the_step(loop):
    loop.backward()
    loop.opt.step()
    loop.opt.zero_grad()


def zero_grad_in_place(loop):
    loop.opt.zero_grad(set_to_none=False)
    loop.backward()
    loop.opt.step()


def a_batch_left_out(loop):
    loop.backward(lambda: math.nan * loop.loss())
    loop.model.zero_grad()
    canonical(loop)


def a_batch_left_out_after_the_forward_pass(loop):
    loop.backward(lambda: 3 * loop.loss())
    zero_grad_of_the_model_after_the_forward_pass(loop)


def an_input_gradient_before_the_backward_pass(loop):
    loop.opt.zero_grad()
    loop.saliency()
    loop.backward()
    loop.opt.step()


def an_input_gradient_before_the_step(loop):
    loop.opt.zero_grad()
    loop.backward()
    loop.saliency()
    loop.opt.step()


def an_input_gradient_through_the_same_graph(loop):
    loop.opt.zero_grad()
    x = loop.x.clone().requires_grad_()
    with loop.recording():
        output = loop.model(x)
        loss = F.cross_entropy(output, loop.y)
        torch.autograd.grad(output[:, 0].sum(), x, retain_graph=True)
        loop.backward_of(loss)
    loop.opt.step()


def a_gradient_norm_through_the_same_graph(loop):
    loop.opt.zero_grad()
    with loop.recording():
        loss = loop.loss()
        torch.autograd.grad(loss, list(loop.model.parameters()), retain_graph=True)
        loop.backward_of(loss)
    loop.opt.step()


def a_validation_pass_before_the_step(loop):
    loop.opt.zero_grad()
    loop.backward()
    loop.loss()
    with torch.no_grad():
        loop.model(7 * loop.x)
    loop.opt.step()


def a_copy_of_the_model_in_between(loop):
    loop.opt.zero_grad()
    loop.backward()
    twin = copy.deepcopy(loop.model)
    F.cross_entropy(twin(loop.x), loop.y).backward()
    loop.opt.step()


def a_scaler(loop):
    loop.opt.zero_grad()
    loop.backward(lambda: loop.scaler.scale(loop.loss()))
    loop.scaler.step(loop.opt)
    loop.scaler.update()


def a_closure(loop):
    loop.opt.step(closure_of(loop.opt, loop.loss))


def a_closure_with_zero_grad_after_the_forward_pass(loop):
    def closure():
        loss = loop.loss()
        loop.opt.zero_grad()
        loss.backward()
        return loss

    loop.opt.step(closure)


def gradients_that_are_assigned(loop):
    loop.opt.zero_grad()
    with loop.recording():
        grads = torch.autograd.grad(loop.loss(), list(loop.model.parameters()))
        for p, g in zip(loop.model.parameters(), grads, strict=True):
            p.grad = g
    loop.opt.step()


ORDERS = [
    value
    for value in list(globals().values())
    if getattr(value, "__module__", "") == __name__ and not isinstance(value, type)
]
REFUSED = {gradients_that_are_assigned: ("told", "model", "known loss")}
"""The orders that give no curvature, and the traits of the optimizers that need one."""


@every
def test_every_order_takes_the_canonical_step(case):
    def ends(order):
        loop = Loop(case)
        for _ in range(2):
            order(loop)
        return snapshot(loop.model)

    expected = ends(canonical)
    for order in ORDERS:
        if case.traits.intersection(REFUSED.get(order, ())):
            with pytest.raises(RuntimeError, match=rf"{case.name}\.step: .*no curvature"):
                ends(order)
            continue
        for a, b in zip(ends(order), expected, strict=True):
            assert torch.equal(a, b), order.__name__
