"""Attention as one kernel, without arrays of scores [R, H, T, S]: bfloat16 on GPUs and TPUs.

GPUs have cuDNN's, by `jax.nn.dot_product_attention`, which is told the inputs' lengths where they
are known: an array of a mask takes it as long again. TPUs have the kernel here, for inputs so short
that the scores of a head lie in VMEM: it reads heads where the projections have put them, keeps
nothing for the gradient, and so touches HBM for queries, keys, values and context alone. JAX's own
do not fit: flash_attention writes two float32 sums of every row of scores, each 128 times, at 256
tokens as many bytes as the scores themselves, and both its operands and splash_attention's are laid
out anew, head by head, in rows of 128 numbers of which BART's and BERT's heads fill 64.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rag_jax import parallel
from rag_jax.marginal import MASKED

FEWEST = 64  # queries of a head; for few, cuDNN's takes longer than plain products do
LARGEST = 2**18  # scores of a head that lie in VMEM, about six times in float32
LANES = 128  # a block is as wide as some of these, and holds whole heads


def fused_attention(queries: jax.Array, keys: jax.Array, values: jax.Array,
                    mask: jax.Array | None, lengths: jax.Array | None = None
                    ) -> jax.Array | None:
    """Context [R, T, H * C] by one kernel, or None where there is none for such arrays.

    Args:
      queries: [R, H, T, C], scaled;  keys: [R, H, C, S];  values: [R, H, S, C].
      mask: bool, broadcastable to [R, H, T, S].
      lengths: int32[R] where the tokens of R inputs attend to one another and the mask says no more
        than how many there are. What is beyond them in the context is not defined.
    """
    if queries.dtype != jnp.bfloat16 or mask is None:
        return None
    kernel = KERNELS.get(parallel.platform(queries))
    if kernel is None:
        return None
    by_tokens = (queries.swapaxes(1, 2), keys.transpose(0, 3, 1, 2), values.swapaxes(1, 2))
    # [R, T, H, C], [R, S, H, C]: XLA drops transposes of these.
    return kernel(*by_tokens, mask, lengths)


def _cudnn(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array,
           lengths: jax.Array | None) -> jax.Array | None:
    rows, targets, _, size = queries.shape
    if (mask.ndim != 4 or targets < FEWEST or targets % 8 or keys.shape[1] % 2 or size % 8
            or size > 128):
        return None
    if lengths is None:
        allowed = {"mask": jnp.broadcast_to(mask, (*mask.shape[:2], targets, keys.shape[1]))}
    else:
        allowed = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    context = jax.nn.dot_product_attention(queries, keys, values, scale=1.0,
                                           implementation="cudnn", **allowed)
    return context.reshape(rows, targets, -1)


def _short(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array,
           lengths: jax.Array | None) -> jax.Array | None:
    del lengths
    (rows, targets, heads, size), sources = queries.shape, keys.shape[1]
    mesh = jax.typeof(queries).sharding.mesh
    parts, groups = (parallel.shards(mesh, axis) for axis in ("batch", "heads"))
    if (mask.shape != (rows, 1, 1, sources) or targets % 16 or sources % 16
            or targets * sources > LARGEST or rows % parts or heads % groups
            or heads // groups * size % LANES or LANES % size):
        return None
    attend = functools.partial(short_attention, size)
    if mesh.size > 1:
        row, split = parallel.spec(("batch",)), parallel.spec(("batch", None, "heads"))
        attend = jax.shard_map(attend, mesh=mesh, in_specs=(row, split, split, split),
                               out_specs=split, check_vma=False)
    return attend(mask[:, 0].astype(jnp.int32),
                  *(x.reshape(*x.shape[:2], -1) for x in (queries, keys, values)))


KERNELS = {"gpu": _cudnn, "tpu": _short}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def short_attention(size: int, mask: jax.Array, queries: jax.Array, keys: jax.Array,
                    values: jax.Array) -> jax.Array:
    """Context [R, T, D] of queries [R, T, D] over keys and values [R, S, D], of heads `size` wide,
    on one TPU. mask: int32[R, 1, S], not 0 where attention is allowed."""
    return _run(_forward, size, mask, (queries, keys, values), queries)[0]


def _kept(size: int, *given: jax.Array) -> tuple[jax.Array, tuple]:
    return short_attention(size, *given), given


def _backward_pass(size: int, given: tuple, grad: jax.Array) -> tuple:
    mask, *inputs = given
    return None, *_run(_backward, size, mask, (*inputs, grad), *inputs)


short_attention.defvjp(_kept, _backward_pass)


def _run(kernel: Callable, size: int, mask: jax.Array, given: tuple[jax.Array, ...],
         *results: jax.Array) -> list[jax.Array]:
    """A kernel over blocks of a row and a few heads; the results are as large as these arrays."""
    from jax.experimental import pallas as pl  # half a second, which others need not wait

    rows, _, width = given[0].shape
    block = 2 * LANES if width % (2 * LANES) == 0 else LANES

    def heads_of(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, x.shape[1], block), lambda row, part: (row, 0, part))

    return pl.pallas_call(
        functools.partial(kernel, size), grid=(rows, width // block),
        in_specs=[pl.BlockSpec((None, *mask.shape[1:]), lambda row, part: (row, 0, 0)),
                  *map(heads_of, given)],
        out_specs=[*map(heads_of, results)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results])(mask, *given)


def _forward(size: int, mask: jax.Ref, queries: jax.Ref, keys: jax.Ref, values: jax.Ref,
             context: jax.Ref) -> None:
    for head in _heads(size, queries):
        weights_TS = _weights(queries[head], keys[head], mask[...])
        context[head] = _product(
            weights_TS.astype(values.dtype), values[head], 1, 0).astype(context.dtype)


def _backward(size: int, mask: jax.Ref, queries: jax.Ref, keys: jax.Ref, values: jax.Ref,
              grad: jax.Ref, *results: jax.Ref) -> None:
    of_queries, of_keys, of_values = results
    for head in _heads(size, queries):
        queries_TC, keys_SC, grad_TC = queries[head], keys[head], grad[head]
        weights_TS = _weights(queries_TC, keys_SC, mask[...])
        of_weights_TS = _product(grad_TC, values[head], 1, 1)
        mean_T1 = (weights_TS * of_weights_TS).sum(axis=-1, keepdims=True)
        of_scores_TS = jnp.where(
            mask[...] != 0, weights_TS * (of_weights_TS - mean_T1), 0.0).astype(queries.dtype)
        of_queries[head] = _product(of_scores_TS, keys_SC, 1, 0).astype(of_queries.dtype)
        of_keys[head] = _product(of_scores_TS, queries_TC, 0, 0).astype(of_keys.dtype)
        of_values[head] = _product(
            weights_TS.astype(grad.dtype), grad_TC, 0, 0).astype(of_values.dtype)


def _heads(size: int, block: jax.Ref) -> list[tuple[slice, slice]]:
    return [(slice(None), slice(start, start + size)) for start in range(0, block.shape[1], size)]


def _weights(queries: jax.Array, keys: jax.Array, mask: jax.Array) -> jax.Array:
    """float32[T, S], over the allowed keys; uniform where there are none, as a plain softmax is."""
    scores = jnp.where(mask != 0, _product(queries, keys, 1, 1), MASKED)
    powers = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _product(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    return jax.lax.dot_general(left, right, (((left_axis,), (right_axis,)), ((), ())),
                               preferred_element_type=jnp.float32)
