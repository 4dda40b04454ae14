"""Cora: who cites whom, which words are in which paper, and what each paper is about (Sen et al. 2008)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.run.files import data_file
from metagrad.sparse import Pattern, SparseTensor

FILE = "planetoid/cora.npz"


class Citations(NamedTuple):
    """An undirected graph of papers. ``train``, ``val`` and ``test`` are sorted indices of nodes."""

    pairs: Tensor  # [edges, 2], the smaller node first, in ascending order
    words: SparseTensor  # [nodes, words], ones
    labels: Tensor  # [nodes]
    train: Tensor
    val: Tensor
    test: Tensor

    @property
    def nodes(self) -> int:
        """Number of papers."""
        return len(self.labels)

    @property
    def classes(self) -> int:
        """Number of subjects."""
        return int(self.labels.max()) + 1

    @property
    def unlabelled(self) -> Tensor:
        """The nodes that are not trained on."""
        return torch.cat([self.val, self.test])


def load() -> Citations:
    """Read the graph, with the split of Planetoid (Yang et al. 2016).

    Raises:
        FileNotFoundError: The file is not there.
    """
    with np.load(data_file(FILE), allow_pickle=False) as file:
        arrays = {name: torch.from_numpy(file[name]).long() for name in file.files if name != "x_data"}
    shape = tuple(arrays["x_shape"].tolist())
    nodes = torch.repeat_interleave(torch.arange(shape[0]), arrays["x_indptr"].diff())
    pattern, _ = Pattern.coalesce(nodes, arrays["x_indices"], shape)
    words = SparseTensor(pattern, torch.ones(pattern.nnz))
    return Citations(
        ordered(arrays["edges"]), words, *(arrays[name] for name in ("y", "train", "val", "test"))
    )


def largest_component(graph: Citations, generator: torch.Generator) -> Citations:
    """Return the largest connected component, with random tenths of the nodes for training and validation.

    As in Zügner and Günnemann, "Adversarial attacks on graph neural networks via meta learning", ICLR 2019.
    """
    component = torch.arange(graph.nodes)
    while True:
        least = component.clone()
        for source, target in (graph.pairs.T, graph.pairs.T.flip(0)):
            least.scatter_reduce_(0, source, component[target], "amin")
        if torch.equal(least, component):
            break
        component = least
    kept = component == component.mode().values
    number = kept.cumsum(0) - 1
    row, col = graph.words.pattern.row, graph.words.pattern.col
    inside, nodes = kept[row], int(kept.sum())
    pattern = Pattern(number[row[inside]], col[inside], (nodes, graph.words.shape[1]))
    words = SparseTensor(pattern, torch.ones(pattern.nnz))
    tenth = nodes // 10
    drawn = torch.randperm(nodes, generator=generator).split([tenth, tenth, nodes - 2 * tenth])
    parts = (part.sort().values for part in drawn)
    return Citations(number[graph.pairs[kept[graph.pairs[:, 0]]]], words, graph.labels[kept], *parts)


def ordered(pairs: Tensor) -> Tensor:
    """Return each undirected pair once, shape [edges, 2], with the smaller node first, in ascending order."""
    return torch.unique(pairs.sort(1).values, dim=0)


def normalized(pairs: Tensor, weights: Tensor, nodes: int) -> SparseTensor:
    r"""Return :math:`D^{-1/2} (A + I) D^{-1/2}`, differentiable with respect to the weights of the pairs.

    Kipf, Welling, "Semi-supervised classification with graph convolutional networks", ICLR 2017, equation 2.
    """
    left, right = pairs.unbind(1)
    loops = torch.arange(nodes, device=pairs.device)
    values = torch.cat([weights, weights, weights.new_ones(nodes)])
    matrix = SparseTensor.from_coo(
        torch.cat([left, right, loops]), torch.cat([right, left, loops]), values, (nodes, nodes)
    )
    scale = matrix.sum(1).rsqrt()
    return matrix.with_values(matrix.values * scale[matrix.pattern.row] * scale[matrix.pattern.col])
