"""Float64 references of the baselines, written from the papers' pseudo-code with plain torch; lcsb is not imported.

Use as `import methods_reference`. A reference takes a model with trainable parameters, a list of batches and the draws
that the paper leaves to chance, trains a copy of the model and returns, for each step, every trainable parameter.

    lisa              Pan et al., arXiv 2403.17919, Algorithm 1
    only_layers       one set of layers is trained, the rest never (freezing; Lee et al., arXiv 2210.11466, section 2)
    importance        layers drawn by gradient norm, norms refreshed every R steps
    cached            block descent whose idle blocks reuse their last gradient
    stochastic_depth  Huang et al., arXiv 1603.09382, equations 2 and 4
    mezo              Malladi et al., arXiv 2305.17333, Algorithm 1
"""

from __future__ import annotations

import copy
import re

import numpy as np
import torch


class AdamW:
    """Loshchilov and Hutter's Algorithm 2 for one tensor, with a step count of its own; decay before the step."""

    def __init__(self, learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        self.rate, self.betas, self.eps, self.decay = learning_rate, betas, eps, weight_decay
        self.m = self.v = 0.0
        self.s = 0

    def step(self, x, g):
        b1, b2 = self.betas
        self.s += 1
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        x = x * (1 - self.rate * self.decay)
        corrected = self.m / (1 - b1**self.s)
        return x - self.rate * corrected / ((self.v / (1 - b2**self.s)).sqrt() + self.eps)


def layer_of(name):
    """Decoder layer of a parameter by the number in its name, None outside the layers."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    return int(found.group(1)) if found else None


class Copy:
    """A copy of the model; its trainable parameters by name, with an AdamW each."""

    def __init__(self, model, **adamw):
        self.model = copy.deepcopy(model)
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.n_layers = 1 + max(i for i in map(layer_of, self.parameters) if i is not None)
        self.adamw_settings = adamw
        self.adamw = {name: AdamW(**adamw) for name in self.parameters} if adamw else {}

    def gradients(self, batch):
        loss = self.model(**batch).loss
        values = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        return dict(zip(self.parameters, values, strict=True))

    @torch.no_grad()
    def update(self, name, gradient):
        p = self.parameters[name]
        p.copy_(self.adamw[name].step(p.clone(), gradient))

    def snapshot(self):
        return {name: p.detach().clone() for name, p in self.parameters.items()}


def race(seed, stream, index, weights, k):
    """k draws without replacement, P proportional to `weights`: the first k of an exponential race."""
    e = np.random.default_rng([seed, stream, index]).standard_exponential(len(weights))
    return set(np.argsort(e / np.asarray(weights))[:k].tolist())


def lisa(model, batches, draw, period, moments="keep", **adamw):
    """draw(i): the layers unfrozen in the i-th period; everything outside the layers is trained always."""
    run, path, t = Copy(model, **adamw), [], 0
    for i in range(-(-len(batches) // period)):
        active = draw(i)
        if moments == "drop":
            for name in run.parameters:
                if layer_of(name) is not None and layer_of(name) not in active:
                    run.adamw[name] = AdamW(**adamw)
        for _ in range(period):
            if t == len(batches):
                break
            gradients = run.gradients(batches[t])
            for name, gradient in gradients.items():
                if layer_of(name) is None or layer_of(name) in active:
                    run.update(name, gradient)
            path.append(run.snapshot())
            t += 1
    return path


def only_layers(model, batches, layers, **adamw):
    run, path = Copy(model, **adamw), []
    for batch in batches:
        for name, gradient in run.gradients(batch).items():
            if layer_of(name) in layers:
                run.update(name, gradient)
        path.append(run.snapshot())
    return path


def importance(model, batches, draw, refresh_every, **adamw):
    """draw(t, norms): the layers of step t. Idle layers get a zero gradient (their momentum goes on)."""
    run, path = Copy(model, **adamw), []
    for t, batch in enumerate(batches):
        gradients = run.gradients(batch)
        if t % refresh_every == 0:
            norms = np.zeros(run.n_layers)
            for name, gradient in gradients.items():
                norms[layer_of(name)] += float((gradient**2).sum())
            norms = np.sqrt(norms)
        chosen = draw(t, norms)
        for name, gradient in gradients.items():
            run.update(name, gradient if layer_of(name) in chosen else torch.zeros_like(gradient))
        path.append(run.snapshot())
    return path


def cached(model, batches, blocks, idle, **adamw):
    """Cyclic blocks. Before its first turn a block gets nothing (frozen) or a zero gradient (momentum)."""
    run, path, cache = Copy(model, **adamw), [], {}
    for t, batch in enumerate(batches):
        for name, gradient in run.gradients(batch).items():
            if layer_of(name) in blocks[t % len(blocks)]:
                cache[name] = gradient
            if name in cache:
                run.update(name, cache[name])
            elif idle == "momentum":
                run.update(name, torch.zeros_like(gradient))
        path.append(run.snapshot())
    return path


def survivors(seed, stream, t, n_layers, last_survival):
    """b_l = 1 with probability 1 - l/N (1 - p_N), l = 1, ..., N; drawn until one survives."""
    generator = np.random.default_rng([seed, stream, t])
    while True:
        u = generator.random(n_layers)
        alive = {n - 1 for n in range(1, n_layers + 1) if u[n - 1] < 1 - n / n_layers * (1 - last_survival)}
        if alive:
            return alive


def stochastic_depth(model, batches, alive_at, **adamw):
    """h_l = h_{l-1} + b_l F_l(h_{l-1}); layers with b_l = 0 get a zero gradient."""
    run, path = Copy(model, **adamw), []
    layers = [m for name, m in run.model.named_modules() if re.search(r"\.layers\.\d+$", name)]
    for t, batch in enumerate(batches):
        alive = alive_at(t)
        handles = [
            layer.register_forward_hook(lambda module, args, output: args[0])
            for i, layer in enumerate(layers)
            if i not in alive
        ]
        gradients = run.gradients(batch)
        for handle in handles:
            handle.remove()
        for name, p in run.parameters.items():
            run.update(name, gradients[name] if layer_of(name) in alive else torch.zeros_like(p))
        path.append(run.snapshot())
    return path


def mezo(model, batches, seed_at, epsilon, learning_rate, weight_decay=0.0):
    """seed_at(t): the seed s of step t; theta is perturbed in place in the order of its tensors."""
    run, path = Copy(model), []

    def z_of(s):
        generator = torch.Generator().manual_seed(s)
        return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in run.parameters.values()]

    def perturb(scale, s):
        for p, z in zip(run.parameters.values(), z_of(s), strict=True):
            p += scale * epsilon * z

    with torch.no_grad():
        for t, batch in enumerate(batches):
            s = seed_at(t)
            perturb(1, s)
            above = float(run.model(**batch).loss)
            perturb(-2, s)
            below = float(run.model(**batch).loss)
            perturb(1, s)
            projected_grad = (above - below) / (2 * epsilon)
            for p, z in zip(run.parameters.values(), z_of(s), strict=True):
                p -= learning_rate * (projected_grad * z + weight_decay * p)
            path.append(run.snapshot())
    return path
