"""Attention as one kernel that stores no scores [R, H, T, S], in bfloat16 on GPUs and TPUs.

GPUs run cuDNN's kernel, through `jax.nn.dot_product_attention`. Where the lengths of the inputs are
known, it gets these instead of a mask: to read the array of a mask doubles its time.

TPUs run the kernel of this module, for inputs so short that the scores of a head fit in VMEM. It
reads the heads where the projections have put them and keeps nothing for the backward pass, so that
only queries, keys, values and context move to and from HBM. JAX's own TPU kernels are not used:
flash_attention writes two float32 sums of every row of scores, each 128 times, which at 256 tokens
are as many bytes as the scores themselves; and the operands of both flash_attention and
splash_attention have to be copied, head by head, into rows of 128 numbers, of which the heads of
BART and BERT fill 64.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rag_jax import parallel
from rag_jax.marginal import MASKED

FEWEST = 2**14  # scores of a head; of 16 x 256, cuDNN's kernel takes longer than plain products
LARGEST = 2**18  # scores of a head: about six float32 arrays of them are in VMEM at a time
LANES = 128  # a block's width is a multiple of this, and of the width of a head


def fused_attention(queries: jax.Array, keys: jax.Array, values: jax.Array,
                    mask: jax.Array | None, lengths: jax.Array | None = None
                    ) -> jax.Array | None:
    """Context [R, T, H * C] by one kernel, or None where no kernel takes such arrays.

    Args:
      queries: [R, H, T, C], scaled;  keys: [R, H, C, S];  values: [R, H, S, C].
      mask: bool, broadcastable to [R, H, T, S].
      lengths: int32[R], the number of tokens in each input, for self-attention whose mask says
        nothing else; the context beyond them is then undefined. None = the mask is used.
    """
    if queries.dtype != jnp.bfloat16 or mask is None:
        return None
    kernel = KERNELS.get(parallel.platform(queries))
    if kernel is None:
        return None
    # Heads were split off by transposing [R, T, H, C] and [R, S, H, C]: XLA drops both transposes.
    by_tokens = (queries.swapaxes(1, 2), keys.transpose(0, 3, 1, 2), values.swapaxes(1, 2))
    return kernel(*by_tokens, mask, lengths)


def _cudnn(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array,
           lengths: jax.Array | None) -> jax.Array | None:
    (rows, targets, _, size), sources = queries.shape, keys.shape[1]
    if (mask.ndim != 4 or targets * sources < FEWEST or targets % 8 or sources % 2 or size % 8
            or size > 128):
        return None
    if lengths is None:
        allowed = {"mask": jnp.broadcast_to(mask, (*mask.shape[:2], targets, sources))}
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
            or heads // groups * size % LANES or LANES % size or mesh.size > parts * groups):
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
    """Context [R, T, D] of queries [R, T, D] over keys and values [R, S, D], on one TPU.

    Heads are `size` wide. mask: int32[R, 1, S], not 0 where attention is allowed.
    """
    return _run(_forward, size, mask, (queries, keys, values), queries)[0]


def _forward_pass(size: int, *arguments: jax.Array) -> tuple[jax.Array, tuple]:
    return short_attention(size, *arguments), arguments


def _backward_pass(size: int, arguments: tuple, grad: jax.Array) -> tuple:
    mask, *inputs = arguments
    return None, *_run(_backward, size, mask, (*inputs, grad), *inputs)


short_attention.defvjp(_forward_pass, _backward_pass)


def _run(kernel: Callable, size: int, mask: jax.Array, inputs: tuple[jax.Array, ...],
         *results: jax.Array) -> list[jax.Array]:
    """Runs a kernel on blocks of one row and a few heads; `results` have the results' shapes."""
    from jax.experimental import pallas as pl  # the import takes half a second

    rows, _, width = inputs[0].shape
    block = 2 * LANES if width % (2 * LANES) == 0 else LANES

    def heads_of(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, x.shape[1], block), lambda row, part: (row, 0, part))

    return pl.pallas_call(
        functools.partial(kernel, size), grid=(rows, width // block),
        in_specs=[pl.BlockSpec((None, *mask.shape[1:]), lambda row, part: (row, 0, 0)),
                  *map(heads_of, inputs)],
        out_specs=[*map(heads_of, results)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results])(mask, *inputs)


def _forward(size: int, mask: jax.Ref, queries: jax.Ref, keys: jax.Ref, values: jax.Ref,
             context: jax.Ref) -> None:
    for head in _heads(size, queries):
        weights_TS = _weights(queries[head], keys[head], mask[...])
        context[head] = _product(
            weights_TS.astype(values.dtype), values[head], 1, 0).astype(context.dtype)


def _backward(size: int, mask: jax.Ref, queries: jax.Ref, keys: jax.Ref, values: jax.Ref,
              grad: jax.Ref, *results: jax.Ref) -> None:
    queries_grad, keys_grad, values_grad = results
    for head in _heads(size, queries):
        queries_TC, keys_SC, grad_TC = queries[head], keys[head], grad[head]
        weights_TS = _weights(queries_TC, keys_SC, mask[...])
        weights_grad_TS = _product(grad_TC, values[head], 1, 1)
        mean_T1 = (weights_TS * weights_grad_TS).sum(axis=-1, keepdims=True)
        scores_grad_TS = jnp.where(
            mask[...] != 0, weights_TS * (weights_grad_TS - mean_T1), 0.0).astype(queries.dtype)
        queries_grad[head] = _product(scores_grad_TS, keys_SC, 1, 0).astype(queries_grad.dtype)
        keys_grad[head] = _product(scores_grad_TS, queries_TC, 0, 0).astype(keys_grad.dtype)
        values_grad[head] = _product(
            weights_TS.astype(grad.dtype), grad_TC, 0, 0).astype(values_grad.dtype)


def _heads(size: int, block: jax.Ref) -> list[tuple[slice, slice]]:
    """The place of each head in a block."""
    return [(slice(None), slice(start, start + size)) for start in range(0, block.shape[1], size)]


def _weights(queries: jax.Array, keys: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax float32[T, S] over the allowed keys; uniform where none is allowed, as in
    `attention.attention`."""
    scores = jnp.where(mask != 0, _product(queries, keys, 1, 1), MASKED)
    powers = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _product(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    """The product of two matrices, summed over these axes in float32."""
    return jax.lax.dot_general(left, right, (((left_axis,), (right_axis,)), ((), ())),
                               preferred_element_type=jnp.float32)
