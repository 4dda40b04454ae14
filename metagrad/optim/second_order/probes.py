"""Random numbers of a step, which follow from a seed and the number of the step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_MASK = 2**64 - 1


def generators_of(seed: int, step: int) -> Callable[[torch.device], torch.Generator]:
    """Return a function of a device to its generator, whose state follows from a seed and the number of a step.

    So there is no state of a generator to save. A resumed run, a copy of an optimizer, and every micro-batch of one
    step draw the same probes.
    """
    made: dict[torch.device, torch.Generator] = {}

    def generator(device: torch.device) -> torch.Generator:
        if device not in made:
            made[device] = torch.Generator(device).manual_seed(mixed(seed, step))
        return made[device]

    return generator


def mixed(seed: int, step: int) -> int:
    """Mix two numbers into one of 63 bits, such that neighbors have nothing in common.

    References:
        The finalizer of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
        2014, figure 15, with the constants of Stafford's variant 13.
    """
    z = (seed + (step + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


def signs_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Draw -1 and 1 in the shape of a tensor."""
    bits = torch.empty(tensor.shape, dtype=torch.int8, device=tensor.device).random_(
        0, 2, generator=generator
    )
    return (2 * bits - 1).to(tensor.dtype)
