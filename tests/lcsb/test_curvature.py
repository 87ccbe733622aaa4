"""Hessian products against dense Hessians and finite differences; eigenvalue ends on operators with known spectra."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

from lcsb import LCSBConfig, selective_backward
from lcsb.measure.curvature import (
    Curvature,
    FieldJacobian,
    NotConvergedError,
    NotDeterministicError,
    adamw_diagonal,
    extreme_eigenvalue,
)
from lcsb.measure.memory import read_status


def small(dtype=torch.float64, **changes):
    """A two-layer TINY-L with adapters of rank 1 on q_proj: 256 numbers.

    transformers takes norms and the loss in float32 whatever the type of the model, so differences of gradients are
    good to about four digits at best.
    """
    base = tiny.llama(dtype=dtype, num_hidden_layers=2, **changes)
    model = tiny.with_lora(base, r=1, target_modules=["q_proj"]).eval()
    ids = tiny.batch(model, rows=1, tokens=8)["input_ids"]
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return model, parameters, (lambda: model(input_ids=ids, labels=ids).loss)


def flat_gradient(loss, parameters):
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss(), list(parameters.values()))])


def dense_hessian(curvature):
    return torch.stack([curvature.product(row) for row in torch.eye(curvature.size, dtype=torch.float64)])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_products_equal_central_differences(attention):
    """U45: fused and eager attention, float64."""
    _, parameters, loss = small(attn_implementation=attention)
    jacobian = FieldJacobian(lambda: torch.autograd.grad(loss(), list(parameters.values())), parameters, 3e-3)
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(jacobian.size, dtype=torch.float64, generator=generator) for _ in range(3)]
    expected = [jacobian.product(v) for v in vectors]  # before the graph is made: it moves the parameters
    with Curvature(loss, parameters) as curvature:
        for v, theirs in zip(vectors, expected, strict=True):
            assert float((curvature.product(v) - theirs).norm() / theirs.norm()) < 1e-3


def test_products_through_four_bits(tmp_path):
    """U45: double backward passes through bitsandbytes' layers."""
    import tiny_packed

    folder = tiny_packed.write(tmp_path, "llama", intermediate_size=128)
    model = tiny_packed.reference(folder).eval()
    ids = tiny_packed.tokens(model, 1, 8)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def loss():
        return model(input_ids=ids, labels=ids).loss

    jacobian = FieldJacobian(lambda: torch.autograd.grad(loss(), list(parameters.values())), parameters, 1e-3)
    with Curvature(loss, parameters) as curvature:
        v = torch.randn(curvature.size, generator=torch.Generator().manual_seed(0))
        ours, theirs = curvature.product(v).double(), jacobian.product(v)
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-2


def test_ends_of_the_spectrum_equal_the_dense_ones():
    _, parameters, loss = small()
    with Curvature(loss, parameters) as curvature:
        dense = dense_hessian(curvature)
        assert float((dense - dense.T).norm() / dense.norm()) < 1e-6
        values = torch.linalg.eigvalsh(dense)
        for end, expected in (("largest", values[-1]), ("smallest", values[0])):
            found = curvature.eigenvalue(end, seed=0, tolerance=1e-6, most_products=1000)
            assert found.value == pytest.approx(float(expected), rel=1e-5)
            assert found.residual < 1e-4 * abs(float(values[-1]))


def test_block_curvature_is_the_diagonal_block():
    _, parameters, loss = small()
    block = {n: p for n, p in parameters.items() if "layers.1." in n}
    with Curvature(loss, parameters) as whole, Curvature(loss, block) as part:
        dense = dense_hessian(whole)
        inside = torch.cat([torch.full((p.numel(),), n in block) for n, p in parameters.items()])
        torch.testing.assert_close(dense_hessian(part), dense[inside][:, inside], rtol=1e-6, atol=1e-7)


def test_preconditioned_products():
    """T5: D^-1/2 H D^-1/2 with AdamW's own v; before any step there is none."""
    _, parameters, loss = small()
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3)
    with pytest.raises(ValueError, match="has no second moment yet"):
        adamw_diagonal(optimizer, parameters)
    for _ in range(3):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    diagonal = adamw_diagonal(optimizer, parameters)
    name, parameter = next(iter(parameters.items()))
    state = optimizer.state[parameter]
    torch.testing.assert_close(diagonal[name], (state["exp_avg_sq"] / (1 - 0.999**3)).sqrt() + 1e-8)
    with Curvature(loss, parameters) as plain, Curvature(loss, parameters, diagonal) as scaled:
        dense = dense_hessian(plain)
        root = torch.cat([d.reshape(-1) for d in diagonal.values()]).rsqrt()
        torch.testing.assert_close(dense_hessian(scaled), root[:, None] * dense * root, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="has an entry that is not positive"):
        Curvature(loss, parameters, {n: torch.zeros_like(p) for n, p in parameters.items()})


@pytest.mark.parametrize("mode", ["identity", "mlp"])
def test_surrogate_fields_are_not_symmetric_and_refuse_double_backward(mode):
    """U16, T7: a symmetric solver on this field would be wrong; differences of the field give its true Jacobian."""
    model, parameters, loss = small()
    with selective_backward(model, LCSBConfig(mode, layers_per_step=1), t=0) as lcsb:
        lcsb.begin()
        own = {n: p for n, p in parameters.items() if "layers.0." in n}
        with pytest.raises(RuntimeError, match="double backward through an identity or mlp branch"):
            Curvature(loss, own).__enter__()

        def field():
            return torch.autograd.grad(loss(), list(own.values()))

        jacobian = FieldJacobian(field, own, 3e-3)
        before = torch.cat([p.detach().reshape(-1).clone() for p in own.values()])
        dense = torch.stack(
            [jacobian.product(row) for row in torch.eye(jacobian.size, dtype=torch.float64)], 1
        )
        assert torch.equal(torch.cat([p.detach().reshape(-1) for p in own.values()]), before)
        assert float((dense - dense.T).norm() / dense.norm()) > 0.01
        largest = jacobian.eigenvalues(1, seed=0, tolerance=1e-3)[0]
        expected = max(np.linalg.eigvals(dense.numpy()), key=abs)
        assert abs(largest) == pytest.approx(abs(expected), rel=1e-2)


def test_fifty_products_hold_no_memory():
    """U45."""
    _, parameters, loss = small()
    with Curvature(loss, parameters) as curvature:
        v = torch.ones(curvature.size, dtype=torch.float64)
        for _ in range(5):
            curvature.product(v)
        before = read_status("RssAnon")
        for _ in range(50):
            curvature.product(v)
        assert read_status("RssAnon") - before < 8 << 20


def test_a_loss_that_changes_is_refused():
    model, parameters, _ = small()
    ids = tiny.batch(model, rows=1, tokens=8)["input_ids"]
    generator = torch.Generator().manual_seed(0)

    def loss():
        return model(input_ids=ids, labels=ids).loss * torch.rand((), generator=generator)

    with pytest.raises(NotDeterministicError, match="at the same point; switch dropout off"):
        Curvature(loss, parameters).__enter__()
    with pytest.raises(ValueError, match="no parameters"):
        Curvature(loss, {})


# -- operators with known spectra (U46) --------------------------------------------------------------------------


def diagonal_operator(values):
    return lambda v: np.asarray(values) * v


def ends(values, **settings):
    size = len(values)
    return tuple(
        extreme_eigenvalue(
            diagonal_operator(values),
            size,
            end,
            **{"seed": 0, "tolerance": 1e-8, "most_products": 4000, **settings},
        ).value
        for end in ("smallest", "largest")
    )


def test_known_spectra():
    """U46: no ghosts, the right end, no breakdown on identity, zero and twin values."""
    rng = np.random.default_rng(0)
    assert ends([100.0, *rng.uniform(size=50)])[1] == pytest.approx(100, rel=1e-8)
    assert ends([-10.0, 5.0, *np.ones(20)]) == pytest.approx((-10, 5), rel=1e-8)
    assert ends(np.ones(30)) == pytest.approx((1, 1), rel=1e-8)
    assert ends(np.zeros(30)) == (0.0, 0.0)
    assert ends([3.0, 3.0, *rng.uniform(size=30)])[1] == pytest.approx(3, rel=1e-8)
    assert ends([2.0, -1.0]) == pytest.approx((-1, 2))
    found = [ends([7.0, *rng.uniform(size=40) * 6], seed=seed)[1] for seed in range(3)]
    assert max(found) - min(found) < 1e-3 * max(found)


def test_what_does_not_settle_is_said():
    values = np.linspace(0, 1, 2000)
    with pytest.raises(NotConvergedError, match="largest eigenvalue did not settle to 1e-12 within"):
        extreme_eigenvalue(diagonal_operator(values), 2000, seed=0, tolerance=1e-12, most_products=40)


def test_residual_bounds_the_error():
    values = np.concatenate([[5.0], np.linspace(0, 4, 200)])
    found = extreme_eigenvalue(diagonal_operator(values), 201, seed=1, tolerance=1e-2)
    assert abs(found.value - 5.0) <= found.residual + 1e-9
