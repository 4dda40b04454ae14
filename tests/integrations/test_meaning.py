"""Other libraries compute the meta-gradients that a plain loop computes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, default_collate

import metagrad as mg
from metagrad.meta.algorithm import MetaOutput
from tests.integrations.test_page import require

pytestmark = pytest.mark.filterwarnings("default")  # of the other libraries
ROOT = Path(__file__).parents[2]


def test_two_processes_of_lightning_take_steps_along_the_mean_of_their_meta_gradients(tmp_path):
    require("lightning")
    from tests.integrations.two_processes import LR, Learner, batches

    command = [sys.executable, "-m", "tests.integrations.two_processes", str(tmp_path / "params.pt")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    maml = Learner().maml
    params = list(maml.parameters())
    first, second, third, fourth = batches()  # Lightning deals them out in turn
    for pair in ((first, second), (third, fourth)):
        gradients = torch.autograd.grad(sum(maml(batch).loss for batch in pair) / 2, params)
        with torch.no_grad():
            torch._foreach_add_(params, gradients, alpha=-LR)
    torch.testing.assert_close(torch.load(tmp_path / "params.pt"), params, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["KFAC", "SOAP", "AdaHessian", "SophiaG", "SophiaH", "NewtonCG", "LBFGS"])
def test_lightning_trains_with_our_optimizers(name):
    (lightning,) = require("lightning")
    x, y = torch.randn(64, 4), torch.randint(3, (64,))

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

        def training_step(self, batch, index):
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            make = getattr(mg.optim, name)
            return make(self.model if name == "KFAC" else self.model.parameters(), lr=1e-2)

    learner = Classifier()
    data = DataLoader([(x, y)] * 30, batch_size=None)
    before = F.cross_entropy(learner.model(x), y).item()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **options).fit(
        learner, data
    )
    assert F.cross_entropy(learner.model(x), y).item() < before - 0.01


def learner(steps: int = 2) -> mg.MAML:
    torch.manual_seed(0)
    return mg.MAML(mg.models.MLP([1, 8, 1]), F.mse_loss, inner=mg.optim.rules.sgd(lr=0.05), steps=steps)


def test_accelerate_accumulates_the_mean_of_the_meta_gradients():
    (accelerate,) = require("accelerate")
    batches = [mg.tasks.Sinusoid().sample(3) for _ in range(2)]
    plain = learner()
    (sum(plain(batch).loss for batch in batches) / 2).backward()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    maml, loader = accelerator.prepare(learner(), DataLoader(batches, batch_size=None))
    for batch in loader:
        with accelerator.accumulate(maml):
            accelerator.backward(maml(batch).loss)
    for ours, expected in zip(maml.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def test_bf16_of_fabric_rounds_the_meta_gradient_and_keeps_its_type():
    require("lightning")
    from lightning.fabric import Fabric

    batch, plain = mg.tasks.Sinusoid().sample(8), learner()
    plain(batch).loss.backward()
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
    half = learner()
    maml, _ = fabric.setup(half, torch.optim.Adam(half.parameters()))
    fabric.backward(maml(fabric.to_device(batch)).loss)
    exact = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
    rounded = torch.cat([parameter.grad.flatten() for parameter in half.parameters()])
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).norm() < 0.1 * exact.norm()  # bf16 has 8 bits


def test_batches_and_outputs_pass_through_functions_that_apply_to_tensors():
    utilities, _ = require("lightning_utilities", "accelerate")
    from accelerate.utils import send_to_device

    batch = mg.tasks.Sinusoid().sample(3)
    out = learner()(batch)
    for value in (batch, out):
        doubled = utilities.core.apply_func.apply_to_collection(value, torch.Tensor, torch.Tensor.double)
        assert type(doubled) is type(value)
        assert torch.utils._pytree.tree_leaves(doubled)[0].dtype == torch.float64
        assert type(send_to_device(value, "cpu", non_blocking=True)) is type(value)
    assert isinstance(doubled, MetaOutput)


def test_a_data_loader_collates_tasks_to_a_batch():
    batch = mg.tasks.Sinusoid().sample(3)
    tasks = [mg.tasks.Batch(*(mg.tasks.Examples(e.x[i], e.y[i]) for e in batch)) for i in range(3)]
    collated = default_collate(tasks)
    assert isinstance(collated, mg.tasks.Batch)
    torch.testing.assert_close(collated, batch)
    assert collated.to("meta", non_blocking=True).query.x.is_meta
