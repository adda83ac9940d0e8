"""`python -m rag_jax.build_index`; imported, this module is the function `rag_jax.build_index`."""

from rag_jax import cli

cli.enter(__name__, __spec__.name)
