import torch

from experiments.run.measure import peak_bytes


def test_the_peak_counts_what_was_alive_together():
    def run() -> torch.Tensor:
        first = torch.zeros(1000)
        second = first + torch.zeros(2000)[:1000]  # 4000 + 8000 + 4000 bytes
        del first
        return second + 1

    assert peak_bytes(run) == 16000


def test_matrices_inside_a_kernel_are_counted():
    """torch's gradient of a COO product makes rows x columns inside one operation."""
    n = 300
    indices = torch.arange(n).repeat(2, 1)
    a = torch.sparse_coo_tensor(indices, torch.ones(n), (n, n), is_coalesced=True).requires_grad_()
    loss = torch.sparse.mm(a, torch.ones(n, 2)).sum()
    assert peak_bytes(loss.backward) >= 4 * n * n
