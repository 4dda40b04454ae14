"""The schema of attacks on images: every key and its type. Values live in `conf/attack_images.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field

from experiments.run.config import check_least
from experiments.run.schema import key
from experiments.studies.attack_images.defences import DEFENCES
from experiments.studies.study import StudyConfig
from metagrad.tasks.omniglot.splits import NUM_DRAWERS

CALL = "attack_images"


@dataclass
class DataConfig:
    """The closed set of classes; each seed draws its own characters."""

    classes: int = key("Characters of Omniglot's background.")
    held_out: int = key("Drawings of each, of 20, that are the test images.")
    resize: str = key("How drawings come to 28x28: area, bilinear or nearest.")


@dataclass
class TrainingConfig:
    """The network, and how it is trained by Adam whatever the defence."""

    width: int = key("Channels of the first convolution; the others have twice as many.")
    steps: int = key(
        "Steps of Adam; a defence sets in after a quarter of them, and is whole after two thirds."
    )
    batch: int = key("Images of a step.")
    lr: float = key("The highest rate of a one-cycle schedule.")
    shift: int = key("Pixels by which training images are moved at most.")


@dataclass
class DefenceConfig:
    """The strengths of the defences."""

    gradient: float = key("Weight of the squared norm of the gradient in the image.")
    cure: float = key("Weight of the squared change of that gradient along its sign (CURE).")
    curvature: float = key("Weight of the squared Hessian product along it, times h squared.")
    h: float = key("How far CURE goes, in the Euclidean norm.")
    epsilon: float = key("What adversarial training lets each pixel change by; one of attack.epsilons.")
    attack_steps: int = key("Steps of PGD in adversarial training.")


@dataclass
class AttackConfig:
    """The attacks."""

    epsilons: list[float] = key("What each pixel may change by.")
    gradients: list[int] = key("Budgets of an attack, ascending; a Hessian product counts as two gradients.")
    cg_steps: int = key("The most conjugate gradients of a Newton step.")


@dataclass
class ImagesConfig(StudyConfig):
    """A whole run; each seed has its own characters and test drawings."""

    defences: list[str] = key("Which networks are trained: plain, gradient, cure, curvature, adversarial.")
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    defence: DefenceConfig = field(default_factory=DefenceConfig)
    attack: AttackConfig = field(default_factory=AttackConfig)


def check(config: ImagesConfig) -> None:
    """Refuse what cannot be."""
    data, training, attack = config.data, config.training, config.attack
    least = {
        "data.classes": (data.classes, 2),
        "data.held_out": (data.held_out, 1),
        "defence.attack_steps": (config.defence.attack_steps, 1),
        "attack.cg_steps": (attack.cg_steps, 1),
    }
    names = ("width", "steps", "batch")
    check_least(CALL, least | {f"training.{name}": (getattr(training, name), 1) for name in names})
    unknown = [name for name in config.defences if name not in DEFENCES]
    if unknown or not config.defences:
        raise ValueError(f"{CALL}: defences must be some of {', '.join(DEFENCES)}, got {config.defences}.")
    if data.held_out >= NUM_DRAWERS:
        raise ValueError(f"{CALL}: data.held_out must be below {NUM_DRAWERS}, got {data.held_out}.")
    if (
        not all(0 < epsilon < 1 for epsilon in attack.epsilons)
        or config.defence.epsilon not in attack.epsilons
    ):
        raise ValueError(
            f"{CALL}: attack.epsilons must be between 0 and 1, defence.epsilon={config.defence.epsilon} among them, "
            f"got {attack.epsilons}."
        )
    budgets = attack.gradients
    if not budgets or budgets[0] < 1 or sorted(set(budgets)) != budgets:
        raise ValueError(f"{CALL}: attack.gradients must be ascending, from 1 on, got {budgets}.")
