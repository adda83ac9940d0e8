"""Serves a model to other programs: `python -m rag_jax.serve --workdir DIR`.

OpenAI's API at http://HOST:PORT/v1, a plain one at /answer and /retrieve. All programs are compiled
at the start; /ready says when that is done. Decoding is set by config.eval, as for generate. If the
environment has RAG_JAX_TOKEN, clients must send it, and with RAG_JAX_MEMORY_TOKEN those who change
the indexes at /memory must send that.
"""

import argparse
import gc
import os

from rag_jax import process
from rag_jax.cli import flags
from rag_jax.config import ConfigError
from rag_jax.serving.settings import Settings
from rag_jax.serving.sockets import bound, listen


def main(argv: list[str] | None = None) -> None:
    """Entry point; `argv` without the program's name, None = the process's arguments."""
    options, config = flags.parse_with_config(_parser(), argv, flags.asked_config)
    try:
        import uvicorn

        from rag_jax.serving.app import Server
        from rag_jax.serving.protocol import Bounded
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'rag_jax[serve]'") from None
    sockets = bound(options.host, options.port)
    flags.connect(options, config)

    from rag_jax import api, hosts
    from rag_jax.serving.indexes import Indexes

    if hosts.count() > 1:
        raise ConfigError("a server is one process; give each --num_processes=1")
    rag = api.load(options.workdir, options.run, step=options.step, index=options.index,
                   config=config)
    settings = Settings(
        model=rag.run, host=options.host, token=os.environ.get("RAG_JAX_TOKEN", ""),
        memory_token=os.environ.get("RAG_JAX_MEMORY_TOKEN", ""), batch_sizes=options.batch_sizes,
        max_waiting=max(Settings.max_waiting, *options.batch_sizes), timeout=options.timeout)
    indexes = Indexes(rag, settings)
    del rag  # it would keep the first index open after a swap
    for name in filter(None, map(str.strip, options.open.split(","))):
        indexes.open_also(name)

    def started(failure: Exception | None) -> None:
        if failure is None:
            gc.freeze()  # objects made so far stay, so collections need not look through them
            host = f"[{options.host}]" if ":" in options.host else options.host
            print(f"ready: http://{host}:{sockets[0].getsockname()[1]}", flush=True)
        else:
            web.should_exit = True

    server = Server(indexes, settings, lambda what: print(
        f"compiled {server.worker.compiled} of {server.to_compile}: {what}", flush=True), started)
    print(f"compiling {server.to_compile} programs; the first time takes minutes", flush=True)
    web = uvicorn.Server(uvicorn.Config(
        server.app, log_level="warning", server_header=False, http=Bounded,
        timeout_graceful_shutdown=int(settings.grace), limit_concurrency=1024))
    try:
        web.run(listen(sockets))
    finally:
        if server.worker.compiling:  # which may take minutes, and the interpreter cannot end before
            process.leave(130)
    if server.worker.failure is not None:
        raise server.worker.failure


def _parser() -> argparse.ArgumentParser:
    parser = flags.make_parser("serve", __doc__)
    flags.add_workdir(parser)
    parser.add_argument("--host", default=Settings.host,
                        help="address to listen at; 0.0.0.0 = all of this machine's (default: "
                        "%(default)s, for this machine alone)")
    parser.add_argument("--port", type=int, default=8000,
                        help="0 = a free one, which is printed (default: %(default)s)")
    parser.add_argument("--open", default="", metavar="NAME,NAME", help="further indexes of the "
                        "workdir that a request may name")
    parser.add_argument("--batch_sizes", type=flags.counts, metavar="N,N",
                        default=Settings.batch_sizes,
                        help="questions that are answered at a time (default: 1,4,8,16)")
    parser.add_argument("--timeout", type=flags.seconds, default=Settings.timeout,
                        metavar="SECONDS",
                        help="that a request may take (default: %(default)s)")
    return parser
