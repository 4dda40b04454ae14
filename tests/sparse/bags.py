"""An oracle for ``nn.EmbeddingBag``. torch's bags have no second derivative."""

import torch


def bags(ids, offsets, table, *, mode, weights=None, padding_idx=None):
    """The bag of every id, by a loop."""
    ends = [*offsets.tolist()[1:], len(ids)]
    rows = []
    for start, end in zip(offsets.tolist(), ends, strict=True):
        kept = [
            i for i in range(start, end) if padding_idx is None or int(ids[i]) != padding_idx % len(table)
        ]
        each = [table[ids[i]] * (1 if weights is None else weights[i]) for i in kept]
        if not each:
            rows.append(table[0] * 0)
        elif mode == "max":
            rows.append(torch.stack(each).max(0).values)
        else:
            rows.append(torch.stack(each).sum(0) / (len(each) if mode == "mean" else 1))
    return torch.stack(rows)
