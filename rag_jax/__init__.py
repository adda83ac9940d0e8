"""rag_jax: Retrieval-Augmented Generation (Lewis et al. 2020, arXiv 2005.11401) in JAX.

Dimension letters, the same in names (`logits_BKTV`) and in einsum strings:

    B  questions in a batch          S  source tokens           V  vocabulary
    K  passages per question         T  target tokens           E  retrieval width
    N  passages in the memory        M  beams                   D  model width
    L  tokens of an encoder input    H  attention heads         C  width of one head
    R  rows (B*K, or B*M*K)          F  feed-forward width

`np.ndarray` in a signature means host memory, `jax.Array` device memory.
Log-probabilities are natural logarithms (nats).
"""

__version__ = "0.1.0"
