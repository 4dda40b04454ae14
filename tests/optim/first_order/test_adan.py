from __future__ import annotations

import math

import torch

from metagrad.optim.rules import adan


def test_the_formula_of_the_paper():
    """Algorithm 1 on three elements, number by number, with the paper's shares, which averages lose."""
    lr, beta1, beta2, beta3, eps, decay = 0.1, 0.02, 0.08, 0.01, 1e-3, 0.5
    w, gradients = [1.0, -2.0, 3.0], ([1.0, -1.0, 0.0], [-20.0, 0.5, 2.0], [0.1, 0.1, -0.1])
    m, v, n = list(gradients[0]), [0.0, 0.0, 0.0], [g**2 for g in gradients[0]]
    rule = adan(lr, betas=(1 - beta1, 1 - beta2, 1 - beta3), eps=eps, weight_decay=decay)
    params = {"w": torch.tensor(w, dtype=torch.float64)}
    state = rule.init(params)
    for k, g in enumerate(gradients):
        for i in range(3):
            if k > 0:
                change = g[i] - gradients[k - 1][i]
                m[i] = (1 - beta1) * m[i] + beta1 * g[i]
                v[i] = (1 - beta2) * v[i] + beta2 * change
                n[i] = (1 - beta3) * n[i] + beta3 * (g[i] + (1 - beta2) * change) ** 2
            w[i] = (w[i] - lr / (math.sqrt(n[i]) + eps) * (m[i] + (1 - beta2) * v[i])) / (1 + decay * lr)
        params, state = rule.update({"w": torch.tensor(g, dtype=torch.float64)}, state, params)
        torch.testing.assert_close(params["w"], torch.tensor(w, dtype=torch.float64), rtol=1e-12, atol=0)
        torch.testing.assert_close(
            state.square["w"], torch.tensor(n, dtype=torch.float64), rtol=1e-12, atol=0
        )
