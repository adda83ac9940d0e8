"""`python -m rag_jax.evaluate`."""

if __name__ == "__main__":
    from rag_jax import cli

    cli.run("evaluate")
