"""The generator's output layer, and log-probabilities of known targets with their gradients.

Where several tokens end an answer, they are one outcome: the first has the sum of their
probabilities, and the others have probability 0.

For known targets, logits are [V, R], with the vocabulary first: the products of the forward and of
the backward pass then read the token table as it is in memory, and transpose only states.
"""

import functools

import jax
import jax.numpy as jnp

from rag_jax.marginal import MASKED
from rag_jax.models.layers import capped
from rag_jax.models.products import by_rows, product, transposed
from rag_jax.types import Params


def head(params: Params) -> tuple[jax.Array, jax.Array | None]:
    """The output layer's table float32[V, D], its own or that of the embeddings, and its bias
    float32[V], if any, from a generator's parameters."""
    table = params["output"] if "output" in params else params["embedding"]
    return table, params.get("final_logits_bias")


def logits(table: jax.Array, bias: jax.Array | None, states: jax.Array, cap: float = 0.0
           ) -> jax.Array:
    """Logits float32[..., V] of states [..., D]; cap: as for `layers.capped`."""
    def multiply(rows: jax.Array) -> jax.Array:
        return jnp.einsum("RD,VD->RV", rows, table.astype(rows.dtype),
                          preferred_element_type=jnp.float32)

    # All rows are one matrix: XLA's CPU backend takes a third longer for arrays of more axes, and
    # longer still for `product` with the table transposed.
    found = by_rows(multiply, states.reshape(-1, states.shape[-1])).reshape(*states.shape[:-1], -1)
    if bias is not None:
        found += jnp.expand_dims(bias, range(found.ndim - 1))
    return capped(found, cap)


def with_one_end(logits: jax.Array, ends: tuple[int, ...]) -> jax.Array:
    """Logits float32[..., V] in whose softmax the first of `ends` has the sum of the probabilities
    of all of them, and the others have 0."""
    if not ends:
        return logits
    place = jnp.expand_dims(jnp.arange(logits.shape[-1]), range(logits.ndim - 1))
    total = jax.nn.logsumexp(logits[..., jnp.array(ends)], axis=-1, keepdims=True)
    others = jnp.where(jnp.isin(place, jnp.array(ends)), MASKED, logits)
    return jnp.where(place == ends[0], total, others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def log_probs(table: jax.Array, bias: jax.Array | None, states: jax.Array, targets: jax.Array,
              smoothing: float, again: bool, cap: float = 0.0, ends: tuple[int, ...] = ()
              ) -> tuple[jax.Array, jax.Array]:
    """log p(targets) by the softmax of states @ table.T + bias, and its label-smoothed form.

    Args:
      table: float32[V, D];  bias: float32[V] or None;  states: dtype[R, D];  targets: int32[R].
      smoothing: as in `marginal.target_log_probs`.
      again: the backward pass computes the logits again. Otherwise the compiler may keep float32
        [V, R] until then, which costs nothing if no other logits are computed in between.
      cap: of the logits, as for `layers.capped`.
      ends: as in `with_one_end`; only the first of them occurs in targets.

    Returns:
      float32[R] each, in nats.
    """
    return _forward(table, bias, states, targets, smoothing, again, cap, ends)[0]


def _logits(table: jax.Array, bias: jax.Array | None, states: jax.Array, cap: float) -> jax.Array:
    logits_VR = product(table, transposed(states))
    return capped(logits_VR if bias is None else logits_VR + bias[:, None], cap)


def _forward(table: jax.Array, bias: jax.Array | None, states: jax.Array, targets: jax.Array,
             smoothing: float, again: bool, cap: float, ends: tuple[int, ...]
             ) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    del again
    kept_as, table = table[:0], table.astype(states.dtype)
    logits_VR = _logits(table, bias, states, cap)
    normaliser_R = jax.nn.logsumexp(logits_VR, axis=0)
    target_R = jnp.take_along_axis(logits_VR, targets[None], axis=0)[0]
    if ends:
        target_R = jnp.where(targets == ends[0], _total(logits_VR, ends), target_R)
    log_p_R = smoothed_R = target_R - normaliser_R
    if smoothing:
        mean_R = logits_VR.mean(axis=0)
        smoothed_R = (1 - smoothing) * target_R + smoothing * mean_R - normaliser_R
    return (log_p_R, smoothed_R), (table, bias, states, targets, normaliser_R, kept_as)


def _total(logits_VR: jax.Array, ends: tuple[int, ...]) -> jax.Array:
    """The logit float32[R] of all ends together."""
    return jax.nn.logsumexp(logits_VR[jnp.array(ends)], axis=0)


def _backward(smoothing: float, again: bool, cap: float, ends: tuple[int, ...], residuals: tuple,
              grads: tuple[jax.Array, jax.Array]) -> tuple:
    table, bias, states, targets, normaliser_R, kept_as = (
        jax.lax.optimization_barrier(residuals) if again else residuals)
    grad_R, smoothed_grad_R = grads
    logits_VR = _logits(table, bias, states, cap)
    p_VR = jnp.exp(logits_VR - normaliser_R[None])
    places_V1 = jnp.arange(table.shape[0])[:, None]
    at_target_R = grad_R + (1 - smoothing) * smoothed_grad_R
    at_target_VR = jnp.where(places_V1 == targets[None], at_target_R[None], 0)
    if ends:  # the gradient is divided among them by their probabilities
        shares_VR = jnp.where(jnp.isin(places_V1, jnp.array(ends)),
                              jnp.exp(logits_VR - _total(logits_VR, ends)[None]), 0)
        at_target_VR = jnp.where((targets == ends[0])[None], at_target_R[None] * shares_VR,
                                 at_target_VR)
    logits_grad_VR = at_target_VR - (grad_R + smoothed_grad_R)[None] * p_VR
    if smoothing:
        logits_grad_VR += (smoothing / table.shape[0] * smoothed_grad_R)[None]
    if cap:  # the derivative of the hyperbolic tangent
        logits_grad_VR *= 1 - (logits_VR / cap) ** 2
    narrow_VR = logits_grad_VR.astype(states.dtype)
    return (product(narrow_VR, states).astype(kept_as.dtype),
            None if bias is None else logits_grad_VR.sum(axis=1).astype(bias.dtype),
            product(transposed(narrow_VR), table).astype(states.dtype), None)


log_probs.defvjp(_forward, _backward)
