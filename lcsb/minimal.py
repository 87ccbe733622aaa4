"""Layer-Cyclic Selective Backpropagation on one page. Nothing here is used by the engine; a test holds the two equal.

    python -m lcsb.minimal

Read top to bottom: a small decoder with frozen 4-bit weights and LoRA adapters; the backward pass that holds one layer
at a time; the optimiser step; and the loop, where the law of the idle layers' motion (T6) advances beside the run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
# The levels of 4-bit NormalFloat (QLoRA, arXiv 2305.14314).
NF4 = torch.tensor(
    [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
     0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0], dtype=torch.float64
)  # fmt: skip


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class LoRALinear(nn.Module):
    """y = x (W_q + s B A)^T: W_q is frozen and held in 4 bits, only A (r x in) and B (out x r) are trained."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4, scale: float = 2.0) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs, dtype=torch.float64) / math.sqrt(inputs)
        self.absmax = weight.view(-1, 16).abs().amax(1, keepdim=True)
        self.codes = ((weight.view(-1, 16) / self.absmax)[..., None] - NF4).abs().argmin(-1).to(torch.uint8)
        self.shape, self.scale = weight.shape, scale
        self.a = nn.Parameter(torch.randn(rank, inputs, dtype=torch.float64) / math.sqrt(inputs))
        self.b = nn.Parameter(torch.zeros(outputs, rank, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        weight = (NF4[self.codes.long()] * self.absmax).view(self.shape)  # dequantised for this use only
        return x @ weight.T + self.scale * (x @ self.a.T @ self.b.T)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = LoRALinear(width, 3 * width), LoRALinear(width, width)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = LoRALinear(width, 3 * width), LoRALinear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    """A link of the residual chain: h' = h + attention(h), h'' = h' + mlp(h')."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width), MLP(width)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(norm(h))
        return h + self.mlp(norm(h))


class Model(nn.Module):
    def __init__(self, layers: int = 8, width: int = 16, vocabulary: int = 32, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = torch.randn(vocabulary, width, dtype=torch.float64)
            self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])

    def head_loss(self, h: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy((norm(h) @ self.embedding.T).flatten(0, 1), targets.flatten())

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding[ids[:, :-1]]
        for layer in self.layers:
            h = layer(h)
        return self.head_loss(h, ids[:, 1:])


def selective_gradient(model: Model, ids: Tensor, selected: Sequence[int], mode: str) -> tuple[float, dict]:
    """Loss, and adapter gradients of the `selected` layers only; `mode` says what idle layers do to the gradient.

    exact: h passes through the layer's true Jacobian. identity: through I (the residual path; a surrogate, T7).
    mlp: through the true Jacobian of the MLP branch, I for attention. Layers below the lowest selected one: nothing.
    """
    with torch.no_grad():  # all that is kept is each layer's input
        h = model.embedding[ids[:, :-1]]
        layers: list[Any] = list(model.layers)
        inputs: list[Tensor] = []
        for layer in layers:
            inputs.append(h)
            h = layer(h)
    loss = model.head_loss(h.requires_grad_(), ids[:, 1:])
    (g,) = torch.autograd.grad(loss, h)
    gradients: dict[int, tuple[Tensor, ...]] = {}
    for index in range(len(layers) - 1, min(selected) - 1, -1):
        layer, x = layers[index], inputs[index].requires_grad_()
        if index in selected:
            found = torch.autograd.grad(layer(x), [x, *layer.parameters()], g)
            g, gradients[index] = found[0], found[1:]
        elif mode == "exact":
            (g,) = torch.autograd.grad(layer(x), x, g)
        elif mode == "mlp":
            a = (x + layer.attention(norm(x))).detach().requires_grad_()  # da/dx = I: attention is detached
            (g,) = torch.autograd.grad(a + layer.mlp(norm(a)), a, g)
        elif mode != "identity":
            raise ValueError(f"mode is {mode!r}, expected exact, identity or mlp")
    return float(loss.detach()), gradients


class AdamW:
    """Decay 0. An idle layer has gradient 0 under policy `momentum`, and m still moves it; under `frozen` it stands."""

    def __init__(self, layers: Sequence[nn.Module], learning_rate: float, idle: str) -> None:
        self.layers, self.learning_rate, self.idle = layers, learning_rate, idle
        self.steps = [0] * len(layers)
        self.m, self.v = (
            [[torch.zeros_like(p) for p in layer.parameters()] for layer in layers] for _ in "mv"
        )

    @torch.no_grad()
    def step(self, gradients: dict[int, tuple[Tensor, ...]]) -> None:
        for index, layer in enumerate(self.layers):
            if index not in gradients and self.idle == "frozen":
                continue
            self.steps[index] += 1
            m, v = self.m[index], self.v[index]
            for i, p in enumerate(layer.parameters()):
                g = gradients[index][i] if index in gradients else torch.zeros_like(p)
                m[i] = BETA1 * m[i] + (1 - BETA1) * g
                v[i] = BETA2 * v[i] + (1 - BETA2) * g * g
                p.sub_(self.learning_rate * self.direction(index, i, 0))

    @torch.no_grad()
    def direction(self, index: int, i: int, j: int) -> Tensor:
        """u_j of T6: the step, in units of the learning rate, that comes j idle steps after the present one."""
        m, v, count = self.m[index][i], self.v[index][i], self.steps[index] + j
        return (BETA1**j * m / (1 - BETA1**count)) / ((BETA2**j * v / (1 - BETA2**count)).sqrt() + EPS)


def train(mode: str, idle: str, cycle: int, steps: int, learning_rate: float = 3e-3, seed: int = 0) -> dict:
    """One run. Blocks are contiguous and visited in turn, upward; each cycle, T6 foretells block 0's idle stretch."""
    model = Model(seed=seed)
    layers = list(model.layers)
    optimizer = AdamW(layers, learning_rate, idle)
    blocks = [block.tolist() for block in torch.arange(len(layers)).tensor_split(cycle)]
    watched = next(layers[0].parameters())
    data = torch.Generator().manual_seed(seed)
    losses, error, foretold = [], 0.0, watched.detach()
    for t in range(steps):
        start = torch.randint(32, (4, 1), generator=data)
        ids = (start + torch.arange(17) * 3) % 32  # counting in threes, from anywhere
        loss, gradients = selective_gradient(model, ids, blocks[t % cycle], mode)
        optimizer.step(gradients)
        losses.append(loss)
        if t % cycle == 0:  # block 0 was just trained: x after k idle steps is x - eta (u_1 + ... + u_k)
            foretold = watched.detach().clone()
            for j in range(1, cycle if idle == "momentum" else 1):
                foretold = foretold - learning_rate * optimizer.direction(0, 0, j)
        if t % cycle == cycle - 1:
            error = max(error, float((watched.detach() - foretold).abs().max()))
    return {"losses": losses, "law error": error, "model": model}


def main() -> None:
    sys.stdout.write("mode      idle      p   first loss   mean of last 20   largest error of T6\n")
    arms = "exact momentum 1, exact momentum 4, exact frozen 4, mlp momentum 4, identity momentum 4"
    for arm in arms.split(", "):
        mode, idle, p = arm.split()
        run = train(mode, idle, int(p), steps=120)
        last = sum(run["losses"][-20:]) / 20
        first, error = run["losses"][0], run["law error"]
        sys.stdout.write(f"{mode:9} {idle:9} {p} {first:12.4f} {last:17.4f} {error:21.1e}\n")


if __name__ == "__main__":
    main()
