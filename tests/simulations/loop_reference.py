"""The slow reference: one run after another in plain numpy, preallocated and in place for SGD."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def loop_run(a, blocks, sequence, start, eta, optimizer, idle, beta, betas, eps, decay):
    """x after the steps of `sequence` (-1: every block), losses after each step; scalar textbook updates."""
    n = len(start)
    x, m, v, count = start.copy(), np.zeros(n), np.zeros(n), np.zeros(n)
    losses = []
    for j in sequence:
        selected = np.arange(n) if j < 0 else np.asarray(blocks[j])
        g = np.zeros(n)
        g[selected] = (a @ x)[selected]
        for i in range(n):
            active = i in selected
            if not active and (idle == "frozen" or optimizer == "sgd"):
                continue
            if optimizer == "sgd":
                x[i] = (1 - eta * decay) * x[i] - eta * g[i]
            elif optimizer == "adamw":
                count[i] += 1
                m[i] = betas[0] * m[i] + (1 - betas[0]) * g[i]
                v[i] = betas[1] * v[i] + (1 - betas[1]) * g[i] ** 2
                m_hat, v_hat = m[i] / (1 - betas[0] ** count[i]), v[i] / (1 - betas[1] ** count[i])
                x[i] = (1 - eta * decay) * x[i] - eta * m_hat / (np.sqrt(v_hat) + eps)
            else:
                m[i] = beta * m[i] + (1.0 if optimizer == "heavy-ball" else 1 - beta) * g[i]
                x[i] = (1 - eta * decay) * x[i] - eta * m[i]
        losses.append(0.5 * x @ a @ x)
    return x, np.array(losses)
