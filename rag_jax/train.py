"""`python -m rag_jax.train`; imported, this module is the function `rag_jax.train`."""

if __name__ == "__main__":
    from rag_jax import cli

    cli.run("train")
elif __name__ == "rag_jax.train":
    import sys

    from rag_jax.api import train

    sys.modules[__name__] = train
