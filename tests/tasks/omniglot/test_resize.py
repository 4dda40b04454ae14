from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metagrad.tasks.omniglot.resize import RESIZERS, resize_area, resize_nearest

INK = torch.from_numpy(np.random.default_rng(0).integers(0, 2, (3, 105, 105)).astype(np.uint8) * 255)


@given(size=st.integers(1, 220))
@settings(max_examples=30, deadline=None)
def test_nearest_equals_pillow_on_black_and_white(size):
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.fromarray(INK[0].numpy()).convert("1")
    # Lanczos is what MAML's code asks for; Pillow gives mode "1" NEAREST whatever is asked.
    expected = np.array(image.resize((size, size), image_module.Resampling.LANCZOS).convert("L"))
    assert np.array_equal(resize_nearest(INK[:1], size)[0].numpy(), expected)


def test_area_is_the_mean_of_whole_blocks():
    blocks = INK.view(3, 35, 3, 35, 3).double().mean((2, 4))
    assert torch.equal(resize_area(INK, 35), blocks.round().to(torch.uint8))


def test_area_weighs_pixels_by_the_part_that_is_covered():
    image = torch.tensor([[[0, 0, 240], [0, 0, 240], [0, 0, 240]]], dtype=torch.uint8)
    # Each of two pixels covers 1.5: the right one takes half of the middle column and all of the last.
    assert resize_area(image, 2).tolist() == [[[0, 160], [0, 160]]]


@pytest.mark.parametrize("name", RESIZERS)
@pytest.mark.parametrize("size", [1, 28, 150])
def test_every_filter_keeps_constants(name, size):
    white = torch.full((2, 105, 105), 255, dtype=torch.uint8)
    resized = RESIZERS[name](white, size)
    assert resized.dtype == torch.uint8
    assert torch.equal(resized, torch.full((2, size, size), 255, dtype=torch.uint8))
