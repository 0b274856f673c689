"""Partial attention merged by log-sum-exp equals attention over all keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from blockrank.attention.merge import merge_partial


def attention(q, k, v, mask):
    """Output [T K G H] and log-sum-exp [T K G] of one list, as the definition reads."""
    logits = jnp.where(mask[:, None, None], jnp.einsum("tkgh,skh->tkgs", q, k), -jnp.inf)
    lse = jax.scipy.special.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None])
    return jnp.einsum("tkgs,skh->tkgh", weights, v), lse


def tensors() -> tuple[np.ndarray, ...]:
    """q, k, v and a mask under which query 0 sees nothing, and query 1 nothing of the first part."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 2, 3, 8), (9, 2, 8), (9, 2, 8)))
    mask = rng.random((4, 9)) < 0.7
    mask[0], mask[1, :4], mask[1, 5] = False, False, True
    return q, k, v, mask


PARTS = (slice(0, 4), slice(4, 5), slice(5, 9))


def in_parts(q, k, v, mask):
    outputs, lses = zip(*(attention(q, k[p], v[p], mask[:, p]) for p in PARTS), strict=True)
    return merge_partial(outputs, lses)


def test_parts_equal_the_whole() -> None:
    q, k, v, mask = tensors()
    whole, merged = attention(q, k, v, mask)[0], in_parts(q, k, v, mask)
    np.testing.assert_allclose(merged, whole, rtol=0, atol=1e-6)
    assert not np.asarray(merged)[0].any()


def test_stacked_parts_in_any_order() -> None:
    q, k, v, mask = tensors()
    outputs, lses = zip(*(attention(q, k[p], v[p], mask[:, p]) for p in PARTS[::-1]), strict=True)
    merged = merge_partial(jnp.stack(outputs), jnp.stack(lses))
    np.testing.assert_allclose(merged, in_parts(q, k, v, mask), rtol=0, atol=1e-6)


def test_gradients_reach_outputs_and_log_sum_exps() -> None:
    """Finite, and those of the whole: a merge that held the shares constant would get dq and dk wrong."""
    q, k, v, mask = tensors()
    mask[0] = True
    cotangent = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)

    def gradients(function):
        return jax.grad(lambda *x: jnp.vdot(function(*x, mask), cotangent), argnums=(0, 1, 2))(q, k, v)

    expected = gradients(lambda *x: attention(*x)[0])
    for ours, theirs in zip(gradients(in_parts), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_a_query_that_sees_nothing_has_zero_gradients() -> None:
    out, lse = jnp.ones((2, 1, 1, 1, 4)), jnp.full((2, 1, 1, 1), -jnp.inf)
    merged, pull = jax.vjp(merge_partial, out, lse)
    assert not np.asarray(merged).any()
    assert all(not np.asarray(g).any() for g in pull(jnp.ones_like(merged)))


def test_shares_by_hand() -> None:
    out = jnp.asarray([[0.0, 4.0], [8.0, 0.0]], jnp.bfloat16).reshape(2, 1, 1, 1, 2)
    lse = jnp.log(jnp.asarray([1.0, 3.0])).reshape(2, 1, 1, 1)
    merged = merge_partial(out, lse)
    assert merged.dtype == jnp.bfloat16
    assert merged.ravel().tolist() == [6.0, 1.0]
