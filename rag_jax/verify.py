"""`python -m rag_jax.verify`."""

if __name__ == "__main__":
    from rag_jax import cli

    cli.run("verify")
