"""`python -m rag_jax.train`; imported, this module is the function `rag_jax.train`."""

from rag_jax import cli

cli.enter(__name__, __spec__.name)
