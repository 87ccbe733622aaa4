"""The slow reference: one run, one step and one coordinate after another, by the textbook equations, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def blocks_by(order, blocks, n):
    """`interleaved` takes coordinate i into block i mod p."""
    return (
        [[i for i in range(n) if i % len(blocks) == j] for j in range(len(blocks))]
        if order == "interleaved"
        else blocks
    )


def choose(order, blocks, gradient, draw):
    """Block of the largest gradient norm, or the one that the draw in [0, 1) hits when norms lie end to end."""
    norms = [float(np.sqrt(sum(gradient[i] ** 2 for i in block))) for block in blocks]
    if order == "greedy":
        return norms.index(max(norms))
    reached, target = 0.0, draw * sum(norms)
    for j, norm in enumerate(norms):
        reached += norm
        if target < reached:
            return j
    return len(blocks) - 1


def loop_run(a, blocks, sequence, start, eta, arm, draws=None):
    """x after the steps, the loss after each, the blocks visited.

    sequence: blocks (-1: every block), or the number of steps where `arm.order` is measured; draws: of `importance`.
    """
    n, idle = len(start), arm.idle
    blocks = blocks_by(arm.order, blocks, n)
    x, m, v, count = start.copy(), np.zeros(n), np.zeros(n), np.zeros(n)
    losses, visited = [], []
    for t in range(sequence) if isinstance(sequence, int) else range(len(sequence)):
        gradient = a @ x
        if isinstance(sequence, int):
            j = choose(arm.order, blocks, gradient, None if draws is None else draws[t])
        else:
            j = sequence[t]
        visited.append(int(j))
        selected = set(range(n)) if j < 0 else set(blocks[j])
        for i in range(n):
            active = i in selected
            if not active and (idle == "frozen" or arm.optimizer == "sgd"):
                continue
            g = gradient[i] if active else 0.0
            shrink = 1 - eta * arm.weight_decay
            if arm.optimizer == "sgd":
                x[i] = shrink * x[i] - eta * g
            elif arm.optimizer == "adamw":
                beta1, beta2 = arm.betas
                count[i] += 1
                m[i] = beta1 * m[i] + (1 - beta1) * g
                v[i] = beta2 * v[i] + (1 - beta2) * g**2
                m_hat, v_hat = m[i] / (1 - beta1 ** count[i]), v[i] / (1 - beta2 ** count[i])
                x[i] = shrink * x[i] - eta * m_hat / (np.sqrt(v_hat) + arm.eps)
            else:
                m[i] = arm.momentum * m[i] + (1.0 if arm.optimizer == "heavy-ball" else 1 - arm.momentum) * g
                x[i] = shrink * x[i] - eta * m[i]
        losses.append(0.5 * x @ a @ x)
    return x, np.array(losses), visited
