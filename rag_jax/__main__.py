"""`python -m rag_jax COMMAND`."""

if __name__ == "__main__":
    from rag_jax import cli

    cli.main()
