"""What an optimizer carries: it can be saved, copied and resumed, and nothing about it changes."""

import copy
import pickle

import pytest
import torch
from torch import nn

from metagrad.core.capture import entropy
from metagrad.optim import KFAC, NewtonCG, Shampoo, SparseAdam
from tests.optim.torch_optim.cases import (
    assert_equal,
    classification,
    every,
    every_one,
    having,
    network,
    optimizer,
    run,
    saved_and_loaded,
    snapshot,
    tensors_of,
)


@every_one
def test_resumes_bit_for_bit(case):
    """``load_state_dict`` of torch casts the state to the dtype of the parameter, which loses 16 bits here."""
    dtype, before = torch.bfloat16, torch.get_rng_state()
    model = network(dtype)
    opt = optimizer(case, model)
    run(opt, classification(model, dtype), 4)
    other = network(dtype)
    other.load_state_dict(saved_and_loaded(model.state_dict()))
    resumed = case.of(other, lr=0.7, **({"seed": 99} if "seed" in case.traits else {}))
    resumed.load_state_dict(saved_and_loaded(opt.state_dict()))
    run(opt, classification(model, dtype), 5)
    run(resumed, classification(other, dtype), 5)
    assert_equal(snapshot(model), snapshot(other))
    assert all(p.dtype == torch.bfloat16 and p in resumed.state for p in other.parameters())
    assert all(value.dtype == torch.float32 for value in tensors_of(resumed))
    assert torch.equal(before, torch.get_rng_state())


@every
def test_dtype_device_and_identity_of_parameters_are_kept(case):
    for dtype in (torch.float32, torch.float16):
        model = network(dtype)
        before = [(id(p), p.data_ptr(), p.dtype, p.device) for p in model.parameters()]
        run(optimizer(case, model), classification(model, dtype), 2)
        assert before == [(id(p), p.data_ptr(), p.dtype, p.device) for p in model.parameters()]
        assert all(p.isfinite().all() and p.is_leaf and p.requires_grad for p in model.parameters())


@every
def test_a_state_of_float64_continues_a_model_of_float32(case):
    model, other = network(torch.float64), network()
    opt, second = optimizer(case, model), optimizer(case, other)
    run(opt, classification(model, torch.float64), 2)
    second.load_state_dict(saved_and_loaded(opt.state_dict()))
    run(second, classification(other), 1)
    assert all(value.dtype == torch.float32 for value in tensors_of(second))


@every
def test_loading_shares_no_memory(case):
    model, other = network(), network()
    opt, second = optimizer(case, model), optimizer(case, other)
    run(opt, classification(model), 2)
    state = opt.state_dict()
    kept = copy.deepcopy(state)
    second.load_state_dict(state)
    run(second, classification(other), 3)
    for number, slots in kept["state"].items():
        for name, value in slots.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, opt.state_dict()["state"][number][name])


@every
def test_groups_are_loaded_into_those_that_were_added_later(case):
    models = [network() for _ in range(2)]
    opts = [optimizer(case, model, [{"params": [model.first.weight]}]) for model in models]
    run(opts[0], classification(models[0]), 1)
    for opt, model, lr in zip(opts, models, (0.01, 0.5), strict=True):
        opt.add_param_group({"params": [model.second.weight], "lr": lr})
    run(opts[0], classification(models[0]), 1)
    models[1].load_state_dict(models[0].state_dict())
    opts[1].load_state_dict(opts[0].state_dict())
    for opt, model in zip(opts, models, strict=True):
        run(opt, classification(model), 1)
    assert_equal(*map(snapshot, models))


@every
def test_copies_with_its_model(case):
    model = network()
    opt = optimizer(case, model)
    run(opt, classification(model), 2)
    twins = [copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))]
    run(opt, classification(model), 3)
    for twin, other in twins:
        run(other, classification(twin), 3)
        assert other.param_groups[0]["params"][0] is next(twin.parameters())
        assert_equal(snapshot(model), snapshot(twin))


@having("seed")
def test_random_numbers_follow_the_seed(case):
    def after(seed):
        model = network()
        opt = optimizer(case, model, seed=seed)
        run(opt, classification(model), 2)
        return tensors_of(opt)

    assert_equal(after(5), after(5))
    assert not all(torch.equal(a, b) for a, b in zip(after(5), after(6), strict=True))


@having("seed")
def test_without_a_seed_it_is_torchs(case):
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        assert case.of(network()).param_groups[0]["seed"] == torch.initial_seed()


def test_steps_and_seeds_mix_without_collisions():
    numbers = {entropy(seed, step) for seed in range(100) for step in range(100)}
    assert len(numbers) == 10000
    assert all(0 <= number < 2**63 for number in numbers)


def test_rows_resume_bit_for_bit():
    def made():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Embedding(50, 3, sparse=True, dtype=torch.bfloat16)

    def steps(table, opt, ids):
        for row in ids:
            opt.zero_grad()
            table(torch.tensor([row, 2])).float().pow(2).sum().backward()
            opt.step()

    table, other = made(), made()
    opt, resumed = (SparseAdam(t.parameters(), lr=0.1) for t in (table, other))
    steps(table, opt, [4, 9])
    other.load_state_dict(table.state_dict())
    resumed.load_state_dict(saved_and_loaded(opt.state_dict()))
    assert resumed.state[other.weight]["rows"].dtype == torch.int64
    steps(table, opt, [4, 30])
    steps(other, resumed, [4, 30])
    assert torch.equal(table.weight, other.weight)


@pytest.mark.parametrize(
    ("make", "option", "before", "after"),
    [
        (lambda model: KFAC(model, momentum=0.0), "momentum", 0.0, 0.9),
        (lambda model: SparseAdam(model.parameters()), "amsgrad", False, True),
        (lambda model: Shampoo(model.parameters()), "graft", False, True),
    ],
)
def test_an_option_that_is_set_between_steps_begins_its_slot_then(make, option, before, after):
    """The momentum of a schedule that warms up from 0, say."""
    model = network()
    opt = make(model)
    for value in (before, after, before, after):
        opt.param_groups[0][option] = value
        run(opt, classification(model), 1)
    assert all(p.isfinite().all() for p in model.parameters())
    slots = {name for state in opt.state.values() for name in state}
    assert slots >= {"momentum": {"momentum"}, "amsgrad": {"peak"}, "graft": {"square"}}[option]


def test_what_parameters_share_is_kept_where_the_first_has_no_gradient():
    model = network()
    opt = NewtonCG(model.parameters(), damping=1.0)
    run(opt, classification(model), 3)
    damping = opt.stats["damping"]
    assert damping < 0.5
    model.first.weight.requires_grad_(False)
    run(opt, classification(model), 1)
    assert opt.stats["damping"] < damping
