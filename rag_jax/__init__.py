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

import importlib
import typing

if typing.TYPE_CHECKING:
    from rag_jax.api import Rag, build_index, load, train
    from rag_jax.config import Config
    from rag_jax.types import Answer, Evidence

__version__ = "0.1.0"
__all__ = ["Answer", "Config", "Evidence", "Rag", "build_index", "load", "train"]

_MODULES = {"Config": "config", "Answer": "types", "Evidence": "types"}  # the others: api


def __getattr__(name: str) -> typing.Any:
    """The names above, imported when they are first used: jax takes a second."""
    if name not in __all__:
        raise AttributeError(f"module 'rag_jax' has no attribute {name!r}")
    module = importlib.import_module(f"rag_jax.{_MODULES.get(name, 'api')}")
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
