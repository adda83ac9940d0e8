"""rag_jax: Retrieval-Augmented Generation (Lewis et al. 2020, arXiv 2005.11401) in JAX.

Dimension letters of shapes, einsum strings and the names of arrays (`logits_RTV`):

    A  answers per question          L  tokens of an encoder input    S  source tokens
    B  questions in a batch          M  beams                         T  target tokens
    C  width of one head             N  passages in the index         V  vocabulary
    D  model width                   P  passages of a DPR batch, or   Y  classes
    E  retrieval width                  prefixes of an exact search
    F  feed-forward width            Q  tokens of a question behind
    G  answers scored in one pass       its passage
    H  attention heads               R  rows of a pass: questions,
    K  passages per question            documents (B*K) or searches

`np.ndarray` in a signature means host memory, `jax.Array` device memory.
Log-probabilities are natural logarithms (nats).
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from rag_jax.api import Rag, build_index, load, train, update_index
    from rag_jax.config import Config
    from rag_jax.ingestion import ingest
    from rag_jax.types import Answer, Evidence

__version__ = "0.1.0"
__all__ = ["Answer", "Config", "Evidence", "Rag", "build_index", "ingest", "load", "train",
           "update_index"]

_MODULES = {"Config": "config", "Answer": "types", "Evidence": "types",
            "ingest": "ingestion"}  # the others: api


def __getattr__(name: str) -> typing.Any:
    """The names above, imported when they are first used: jax takes a second."""
    if name not in __all__:
        raise AttributeError(f"module 'rag_jax' has no attribute {name!r}")
    module = importlib.import_module(f"rag_jax.{_MODULES.get(name, 'api')}")
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
