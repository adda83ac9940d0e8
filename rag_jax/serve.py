"""`python -m rag_jax.serve`."""

if __name__ == "__main__":
    from rag_jax import cli

    cli.run("serve")
