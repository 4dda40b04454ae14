"""A meta-learner on two processes of Lightning: ``python -m tests.integrations.two_processes FILE``."""

import sys

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

import metagrad as mg

LR = 0.1


class Learner(lightning.LightningModule):
    """A small MAML in double precision, the same in each process."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        model = mg.models.MLP([1, 8, 1], activation=torch.nn.Tanh).double()
        self.maml = mg.MAML(model, F.mse_loss, inner=mg.optim.rules.sgd(lr=0.05), steps=2)

    def training_step(self, batch, index):
        return self.maml(batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.maml.parameters(), lr=LR)


def batches() -> list[mg.tasks.Batch]:
    tasks, seeds = mg.tasks.Sinusoid(), range(4)
    drawn = [tasks.sample(3, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return [batch.to(torch.float64) for batch in drawn]


def main(file: str) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = DDPStrategy(process_group_backend="gloo", start_method="fork")
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy=strategy, **quiet)
    learner = Learner()
    trainer.fit(learner, DataLoader(batches(), batch_size=None))
    if trainer.is_global_zero:
        torch.save(list(learner.parameters()), file)


if __name__ == "__main__":
    main(sys.argv[1])
