"""`python -m rag_jax.generate`."""

from rag_jax import cli

cli.enter(__name__, __spec__.name)
