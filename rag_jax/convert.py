"""`python -m rag_jax.convert`."""

from rag_jax import cli

cli.enter(__name__, __spec__.name)
