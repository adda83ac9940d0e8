"""`python -m rag_jax.generate`."""

if __name__ == "__main__":
    from rag_jax import cli

    cli.run("generate")
