"""Sparse convolution against torch's convolution of the dense grid, and the rulebook against its definition."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from metagrad.sparse.operations.conv import Rulebook, conv
from tests.sparse.guards import no_large_outputs
from tests.sparse.towers import assert_same_tower, tower

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) / 3


def draw_sites(grid, *, density=0.4, seed=0):
    """Draw sites of a grid [examples, ...], in random order."""
    generator = torch.Generator().manual_seed(seed)
    coords = (torch.rand(grid, generator=generator) < density).nonzero()
    return coords[torch.randperm(len(coords), generator=generator)]


def dense(coords, grid, dilation):
    """Convolve the whole grid, and read the result at the sites."""

    def convolve(x, weight, bias=None):
        sites = coords.unbind(1)
        image = x.new_zeros(*grid, x.shape[1]).index_put(sites, x).movedim(-1, 1)
        padding = [apart * (size // 2) for apart, size in zip(dilation, weight.shape[2:], strict=True)]
        y = CONVOLUTIONS[len(dilation)](image, weight, bias, padding=padding, dilation=dilation)
        return y.movedim(1, -1)[sites]

    return convolve


def sparse(rulebook):
    return lambda x, weight, bias=None: conv(x, weight, rulebook, bias)


CASES = {
    "1-d": ((2, 9), (3,), (1,)),
    "2-d": ((2, 4, 5), (3, 3), (1, 1)),
    "2-d, dilated": ((1, 6, 7), (3, 3), (2, 3)),
    "3-d": ((2, 3, 3, 3), (3, 3, 3), (1, 1, 1)),
    "3-d, flat kernel": ((1, 4, 3, 3), (3, 1, 3), (1, 1, 2)),
}


class TestValues:
    @pytest.mark.parametrize("case", CASES)
    def test_equals_dense_convolution_at_every_order(self, case):
        grid, kernel, dilation = CASES[case]
        coords = draw_sites(grid)
        rulebook = Rulebook(coords, kernel, dilation=dilation)
        inputs = [draw(len(coords), 2), draw(3, 2, *kernel, seed=1), draw(3, seed=2)]
        assert_same_tower(sparse(rulebook), dense(coords, grid, dilation), inputs)

    def test_no_sites(self):
        rulebook = Rulebook(torch.zeros(0, 3, dtype=torch.int64), 3)
        x, weight = draw(0, 2).requires_grad_(), draw(3, 2, 3, 3).requires_grad_()
        y = conv(x, weight, rulebook)
        assert y.shape == (0, 3)
        assert all((g == 0).all() for g in torch.autograd.grad(y.sum(), [x, weight]))

    def test_nothing_is_as_large_as_the_grid_or_as_all_pairs(self):
        line = torch.arange(300)
        coords = torch.stack([torch.zeros_like(line), line, line], 1)
        rulebook = Rulebook(coords, 3)
        with no_large_outputs(300 * 4):
            tower(sparse(rulebook), [draw(300, 4), draw(4, 4, 3, 3, seed=1)])

    def test_only_features_and_weights_are_kept(self):
        coords = draw_sites((1, 20, 20), density=0.9)
        rulebook = Rulebook(coords, 5)
        x, weight = draw(len(coords), 4).requires_grad_(), draw(4, 4, 5, 5, seed=1).requires_grad_()
        kept = {}

        def pack(tensor):
            kept[tensor.untyped_storage()._cdata] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            conv(x, weight, rulebook)
        assert sum(kept.values()) == x.numel() + weight.numel()


class TestTransforms:
    grid = (1, 3, 4)
    coords = draw_sites(grid)
    fn = staticmethod(sparse(Rulebook(coords, 3)))
    oracle = staticmethod(dense(coords, grid, (1, 1)))
    inputs = (draw(len(coords), 2), draw(3, 2, 3, 3, seed=1), draw(3, seed=2))

    @pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, None)])
    def test_vmap(self, in_dims):
        stacked = [
            x if dim is None else torch.stack([x, 2 * x]) for x, dim in zip(self.inputs, in_dims, strict=True)
        ]
        got, expected = (torch.vmap(f, in_dims)(*stacked) for f in (self.fn, self.oracle))
        torch.testing.assert_close(got, expected)

    def test_forward_mode_over_forward_mode(self):
        tangents = tuple(draw(*x.shape, seed=7) for x in self.inputs)

        def second(f):
            def first(*inputs):
                return torch.func.jvp(lambda *i: f(*(x.sin() for x in i)), inputs, tangents)[1]

            return torch.func.jvp(first, self.inputs, tangents)[1]

        torch.testing.assert_close(second(self.fn), second(self.oracle))


class TestRulebook:
    @given(seed=st.integers(0, 10**6), density=st.floats(0, 1), apart=st.integers(1, 3))
    @settings(max_examples=10, deadline=None)
    def test_pairs_are_the_sites_one_offset_apart(self, seed, density, apart):
        coords = draw_sites((2, 4, 5), density=density, seed=seed) - torch.tensor([1, 2, 3])
        rulebook = Rulebook(coords, (3, 5), dilation=apart)
        offsets = [(0, apart * (i - 1), apart * (j - 2)) for i in range(3) for j in range(5)][:7]
        sites = {tuple(site): row for row, site in enumerate(coords.tolist())}
        for (here, there), offset in zip(rulebook.pairs, offsets, strict=True):
            expected = {
                (row, sites[tuple(a + b for a, b in zip(site, offset, strict=True))])
                for site, row in sites.items()
                if tuple(a + b for a, b in zip(site, offset, strict=True)) in sites
            }
            assert set(zip(here.tolist(), there.tolist(), strict=True)) == expected

    def test_a_line_does_not_go_on_in_the_next(self):
        coords = torch.tensor([[0, 0, 3], [0, 1, 0], [1, 0, 0]])
        assert Rulebook(coords, (1, 7)).num_pairs == 3

    def test_coordinates_may_be_far_from_the_origin(self):
        far = 2**40
        assert Rulebook(torch.tensor([[0, far, -far], [0, far, 1 - far]]), 3).num_pairs == 4
