from __future__ import annotations

import torch

from metagrad.optim.rules import lion


def test_the_formula_of_the_paper():
    """Algorithm 2 on three elements, number by number."""
    lr, beta1, beta2, decay = 0.1, 0.9, 0.99, 0.5
    w, m = [1.0, -2.0, 3.0], [0.0, 0.0, 0.0]
    rule = lion(lr, betas=(beta1, beta2), weight_decay=decay)
    params = {"w": torch.tensor(w, dtype=torch.float64)}
    state = rule.init(params)
    for g in ([1.0, -1.0, 0.0], [-20.0, 0.5, 2.0], [0.1, 0.1, -0.1]):
        for i in range(3):
            c = beta1 * m[i] + (1 - beta1) * g[i]
            w[i] -= lr * ((c > 0) - (c < 0) + decay * w[i])
            m[i] = beta2 * m[i] + (1 - beta2) * g[i]
        params, state = rule.update({"w": torch.tensor(g, dtype=torch.float64)}, state, params)
        torch.testing.assert_close(params["w"], torch.tensor(w, dtype=torch.float64), rtol=1e-12, atol=0)
        torch.testing.assert_close(state.mean["w"], torch.tensor(m, dtype=torch.float64), rtol=1e-12, atol=0)
