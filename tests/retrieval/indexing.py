"""`build_index` with all of its settings as one set of keywords, also by several hosts."""

import concurrent.futures
import threading

from rag_jax.errors import UserError
from rag_jax.retrieval import build
from rag_jax.retrieval.protocol import ALONE, Hosts
from rag_jax.retrieval.scann import ScannSettings
from rag_jax.retrieval.shards import PassageEmbedder


def build_index(passages, embed, out, *, kind="auto", settings=ScannSettings(),  # noqa: B008
                recall_queries=None, recall_k=10, recall_target=0.99, overwrite=False, host=0,
                hosts=1, each=ALONE.each, **embedder):
    recall = build.RecallSettings(recall_queries, recall_k, target=recall_target)
    return build.build_index(
        passages, PassageEmbedder(embed, **embedder), out, kind=kind, scann=settings,
        recall=recall, overwrite=overwrite, hosts=Hosts(host, hosts, each))


def build_by_hosts(store, out, embedders, **settings):
    """Hosts as threads of one process, as many as embedders; returns each one's index, or error."""
    barrier, failed = threading.Barrier(len(embedders), timeout=60), []

    def each(make):
        """As `hosts.each`, which exchanges between processes."""
        try:
            made = make()
        except Exception as error:
            failed.append(f"another host: {error}")
            barrier.wait()
            raise
        barrier.wait()
        if failed:
            raise UserError(failed[0])
        return made

    def one(host):
        try:
            return build_index(store, embedders[host], out, **settings, host=host,
                               hosts=len(embedders), each=each, progress=False)
        except (UserError, threading.BrokenBarrierError) as error:
            return error
        except KeyboardInterrupt as kill:  # this host says nothing any more
            barrier.abort()
            return kill

    with concurrent.futures.ThreadPoolExecutor(len(embedders)) as pool:
        return list(pool.map(one, range(len(embedders))))
