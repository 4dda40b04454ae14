"""Drawings of a few alphabets, two fifths of whose training labels are wrong."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.studies import characters as omniglot
from experiments.studies.characters import Examples
from metagrad.tasks.omniglot.splits import NUM_DRAWERS, SPLITS

SPLIT = "background"
BINS, CELLS = 6, 3


@dataclass(frozen=True)
class Data:
    """What is trained on, what weights are learned on, and what is judged on.

    Attributes:
        train: Features `[n, d]` and classes `[n]`, of which some are wrong.
        wrong: Which, `[n]`.
        validation: Examples with their own classes.
        test: Likewise.
        classes: How many there are.
    """

    train: Examples
    wrong: Tensor
    validation: Examples
    test: Examples
    classes: int


@lru_cache(maxsize=8)
def load(
    alphabets: int, characters: int, drawers: tuple[int, int, int], wrong: float, is_white: bool, seed: int
) -> Data:
    """Draw alphabets and split their drawings by who drew them, so that no one is in two parts.

    Args:
        alphabets: The classes.
        characters: Of each.
        drawers: How many draw for training, validation and test.
        wrong: The part of the training examples that get another class, uniformly.
        is_white: Whether features are whitened.
        seed: Of all that is drawn.

    Raises:
        ValueError: There are not so many alphabets of so many characters.
    """
    generator = torch.Generator().manual_seed(seed)
    members = _members(alphabets, characters, generator)
    images = omniglot.load(SPLIT, resize="area")[members.flatten()]
    images = images[:, torch.randperm(NUM_DRAWERS, generator=generator)[: sum(drawers)]]
    x = features(images.flatten(0, 1)).unflatten(0, images.shape[:2])
    x = scaled(x, x[:, : drawers[0]].flatten(0, 1), is_white)
    classes = torch.arange(alphabets).repeat_interleave(characters)
    train, validation, test = omniglot.by_drawers(x, *drawers, classes=classes)
    mislabelled = mislabel(train, wrong, alphabets, generator)
    return Data(mislabelled, mislabelled.y != train.y, validation, test, alphabets)


def scaled(x: Tensor, train: Tensor, is_white: bool) -> Tensor:
    r"""Center features, and scale them so that the Hessian of a mean cross-entropy is at most the identity.

    Whitened features are :math:`(C + \bar\lambda I)^{-1/2} x`, of the covariance C and its mean eigenvalue.
    """
    mean = train.mean(0)
    values, vectors = torch.linalg.eigh((train - mean).double().T.cov(correction=0))
    roots = (values + values.mean()).rsqrt() if is_white else torch.ones_like(values)
    # That of the softmax has no eigenvalue above a half.
    roots = roots * (2 / (values * roots**2).max()).sqrt()
    return (x - mean) @ ((vectors * roots) @ vectors.T).to(x.dtype)


def mislabel(examples: Examples, part: float, classes: int, generator: torch.Generator) -> Examples:
    """Give a part of the examples, drawn at random, another class, each as often."""
    number = len(examples.y)
    chosen = torch.randperm(number, generator=generator)[: round(part * number)]
    shift = torch.zeros_like(examples.y)
    shift[chosen] = torch.randint(1, classes, chosen.shape, generator=generator)
    return examples._replace(y=(examples.y + shift) % classes)


def features(images: Tensor) -> Tensor:
    """Return histograms of the directions of strokes, and of how these change, in coarse cells: `[n, d]` of length 1.

    Dalal and Triggs, "Histograms of oriented gradients for human detection", CVPR 2005, once on the image and once on
    each of its direction maps, as the two layers of a scattering transform (Bruna and Mallat, TPAMI 35(8), 2013).
    """
    first = _directions(F.avg_pool2d(images.unsqueeze(1), 3, stride=1, padding=1), sharpness=4)
    second = _directions(F.avg_pool2d(first, 2), sharpness=2)
    layers = [F.adaptive_avg_pool2d(maps, CELLS).flatten(1).sqrt() for maps in (first, second)]
    return F.normalize(torch.cat([F.normalize(layer) for layer in layers], 1))


def _directions(maps: Tensor, sharpness: int) -> Tensor:
    """Return how strongly each map rises in each of the directions: `[n, maps * BINS, height, width]`."""
    across = F.pad(maps[..., 2:] - maps[..., :-2], (1, 1))
    down = F.pad(maps[..., 2:, :] - maps[..., :-2, :], (0, 0, 1, 1))
    angles = torch.arange(BINS) * (2 * torch.pi / BINS)
    toward = torch.atan2(down, across).unsqueeze(2) - angles[:, None, None]
    strength = torch.hypot(across, down).unsqueeze(2)
    return (strength * toward.cos().clamp_min(0) ** sharpness).flatten(1, 2)


def _members(alphabets: int, characters: int, generator: torch.Generator) -> Tensor:
    """Draw alphabets that have enough characters, and characters of each: `[alphabets, characters]`, of the split."""
    places: dict[str, list[int]] = {}
    for place, character in enumerate(SPLITS[SPLIT].characters):
        places.setdefault(character.alphabet, []).append(place)
    large = [own for own in places.values() if len(own) >= characters]
    if len(large) < alphabets:
        raise ValueError(
            f"clean: {alphabets} alphabets of {characters} characters were asked for, and {len(large)} have as many; "
            "take fewer of either."
        )
    chosen = torch.randperm(len(large), generator=generator)[:alphabets]
    return torch.stack(
        [
            torch.tensor(large[i])[torch.randperm(len(large[i]), generator=generator)[:characters]]
            for i in chosen
        ]
    )
