"""`build_index` with all of its settings as one set of keywords."""

from rag_jax.retrieval import build
from rag_jax.retrieval.protocol import Hosts
from rag_jax.retrieval.scann import ScannSettings
from rag_jax.retrieval.shards import PassageEmbedder


def build_index(passages, embed, out, *, kind="auto", settings=ScannSettings(),  # noqa: B008
                recall_queries=None, recall_k=10, recall_target=0.99, overwrite=False, host=0,
                hosts=1, wait=lambda: None, **embedder):
    recall = build.RecallSettings(recall_queries, recall_k, target=recall_target)
    return build.build_index(
        passages, PassageEmbedder(embed, **embedder), out, kind=kind, scann=settings,
        recall=recall, overwrite=overwrite, hosts=Hosts(host, hosts, wait))
