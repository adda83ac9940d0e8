"""`python -m rag_jax.evaluate`."""

from rag_jax import cli

cli.enter(__name__, __spec__.name)
