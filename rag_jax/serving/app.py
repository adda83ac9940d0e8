"""Routes of the server: who may ask, how long, and what comes back where something is wrong."""

import asyncio
import contextlib
import json
import pathlib
import re
import secrets
import sys
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rag_jax.errors import UserError
from rag_jax.locks import InUseError
from rag_jax.serving import asking, page, results
from rag_jax.serving.batching import Worker
from rag_jax.serving.fields import Fields, Refused, parse
from rag_jax.serving.indexes import Indexes, OpenIndex
from rag_jax.serving.listening import Listener
from rag_jax.serving.metrics import Metrics
from rag_jax.serving.settings import Settings
from rag_jax.types import Answer, Evidence

Handler = Callable[[Request], Awaitable[Response]]
LEFT = 499  # a status for the metrics: the client is gone
ENDING = "the server is ending: what it has not answered by now it does not answer"
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         429: "rate_limit_error"}
UNCOUNTED = {"/health", "/ready", *(f"/{path}" for path in page.FILES)}
PART = r"/[^\s/:;,'\"]+"  # of a path


class _Any(PathConvertor):
    """The rest of a path, newlines included, which an id may have."""

    regex = "(?s:.*)"


register_url_convertor("any", _Any())


class Server:
    """The application: `app` is what an ASGI server runs.

    Args:
      indexes: open; the worker compiles what they answer with.
      settings: of the server.
      compiled, started: as `Worker` takes them.
    """

    def __init__(self, indexes: Indexes, settings: Settings,
                 compiled: Callable[[str], None] = lambda what: None,
                 started: Callable[[Exception | None], None] = lambda failure: None):
        self.settings, self.indexes = settings, indexes
        self.worker = Worker(indexes, settings.batch_sizes[-1], settings.max_waiting, compiled,
                             started)
        self.metrics = Metrics(settings.model, lambda: self.worker.running,
                               lambda: self.worker.waiting)
        self._created = int(time.time())
        programs = indexes.current.programs
        self._to_compile = len(settings.batch_sizes) * sum(
            len(index.programs) for index in indexes.open.values())
        self._models: dict[str, str | None] = {settings.model: None} | {
            f"{settings.model}-{tower.removesuffix('_encoder')}": tower
            for tower in ("query_encoder", "document_encoder") if tower in programs}
        get, post = ["GET"], ["POST"]
        routes = [
            Route("/v1/chat/completions", self._guarded(self._chat), methods=post),
            Route("/answer", self._guarded(self._answer), methods=post),
            Route("/v1/embeddings", self._guarded(self._embed), methods=post),
            *(Route(f"/{version}/rerank", self._guarded(self._rerank), methods=post)
              for version in ("v1", "v2")),
            Route("/retrieve", self._guarded(self._retrieve), methods=post),
            Route("/passages/{index}/{id:any}", self._guarded(self._passage), methods=get),
            Route("/v1/models", self._guarded(self._list_models), methods=get),
            Route("/memory", self._guarded(self._list_memory), methods=get),
            Route("/memory", self._guarded(self._change_memory), methods=post),
            Route("/metrics", self._guarded(self._metrics), methods=get),
            Route("/health", self._health, methods=get),
            Route("/ready", self._ready, methods=get),
            *page.routes(),
        ]
        # Of a server for this machine, a page of another name that leads here is refused.
        hosts = ["localhost", "127.0.0.1", "[::1]", settings.host] if settings.local else ["*"]
        self.app = Starlette(
            routes=routes, lifespan=self._life, exception_handlers={HTTPException: self._plain},
            middleware=[Middleware(_Counted, self.metrics.answered),
                        Middleware(TrustedHostMiddleware, allowed_hosts=hosts)])

    @contextlib.asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        self.worker.start()
        yield
        await asyncio.to_thread(self.worker.close)
        self.indexes.close()

    # --- every request --------------------------------------------------------------------------

    def _guarded(self, handler: Handler) -> Handler:
        """With the token checked, a time limit, and every error as JSON."""
        async def guarded(request: Request) -> Response:
            try:
                changes = handler == self._change_memory  # which go on whether or not one waits
                self._authenticate(request, changes)
                async with asyncio.timeout(None if changes else self.settings.timeout):
                    response = await handler(request)
            except ClientDisconnect:
                response = Response(status_code=LEFT)
            except (Exception, asyncio.CancelledError) as error:
                response = self._failure(error)
            return response

        return guarded

    async def _plain(self, request: Request, error: HTTPException) -> Response:
        """No such route, or not by this method."""
        response = _error(f"{request.method} {request.url.path:.100}: {error.detail}",
                          error.status_code)
        if error.status_code == 405:  # the router names the methods of the path's first route alone
            response.headers["Allow"] = ", ".join(sorted(set().union(
                *(route.methods for route in self.app.routes
                  if route.matches(request.scope)[0] is not Match.NONE))))
        return response

    def _failure(self, error: BaseException) -> Response:
        """The response that says what went wrong, and names no folder of this machine."""
        if isinstance(error, asyncio.CancelledError):  # those who still ask when the grace is over
            return _error(ENDING, 503)
        if isinstance(error, UserError):
            if isinstance(error, Refused):  # which names what the client has sent, and no folder
                return _error(str(error), error.status, error.field)
            indexes = self.indexes
            known = [indexes.current.rag.job.workdir.absolute(), *indexes.paths.values()]
            return _error(_without_paths(str(error), known),
                          503 if isinstance(error, InUseError) else 422)
        if isinstance(error, TimeoutError):
            return _error(f"no answer within {self.settings.timeout:g} seconds", 504)
        if isinstance(error, OSError) and error.strerror:  # a full disk, too many open files, ...
            print(f"error: {error}", file=sys.stderr)
            return _error(f"the server's machine: {error.strerror}", 503)
        traceback.print_exception(error, file=sys.stderr)
        return _error("a defect of the server, which its log describes", 500)

    def _authenticate(self, request: Request, memory: bool) -> None:
        token = (memory and self.settings.memory_token) or self.settings.token
        if memory and not token:
            raise Refused("/memory: changes need a token, and this server was given none: start it "
                          "with RAG_JAX_MEMORY_TOKEN or RAG_JAX_TOKEN", 403)
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if token and not (kind.lower() == "bearer" and secrets.compare_digest(
                given.strip().encode("latin-1"), token.encode())):
            raise Refused("a token is needed: Authorization: Bearer TOKEN", 401)

    async def _body(self, request: Request) -> Fields:
        """The object of a request of at most max_body bytes."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused("expected Content-Type: application/json", 415)
        body, most = bytearray(), self.settings.max_body
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise Refused(f"request: of at most {most} bytes", 413)
        return parse(bytes(body))

    async def _computed(self, request: Request, index: OpenIndex, program: str,
                        given: Sequence[Any]) -> list[Any]:
        """Results of the worker; what a client that has left asked for is not computed."""
        futures = self.worker.submit(index, program, given)
        results = asyncio.gather(*map(asyncio.wrap_future, futures))
        results.add_done_callback(lambda done: done.cancelled() or done.exception())  # logs none
        left = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait((results, left), return_when=asyncio.FIRST_COMPLETED)
            if not results.done():
                raise ClientDisconnect
            return results.result()
        finally:
            left.cancel()
            for future in futures:  # now: by way of `results` they would wait for a turn
                future.cancel()

    # --- OpenAI's -------------------------------------------------------------------------------

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [
            {"id": name, "object": "model", "created": self._created, "owned_by": "rag_jax"}
            for name in self._models]})

    async def _chat(self, request: Request) -> Response:
        began, fields = time.perf_counter(), await self._body(request)
        fields.only(asking.CHAT, asking.NEUTRAL)
        if asking.known_model(fields, self._models) is not None:
            raise Refused("request: \"model\" embeds texts: ask it at /v1/embeddings", 404, "model")
        question = asking.chat_question(fields, self.settings)
        logprobs, stream = fields.flag("logprobs"), fields.flag("stream")
        usage = fields.has("stream_options") and (
            options := Fields("request: stream_options", fields.fields["stream_options"])
        ).flag("include_usage")
        if fields.has("stream_options"):
            options.only(("include_usage", "include_obfuscation"))
        asked, index = self._asked(fields, question)
        tokenizer = index.rag.job.prepared.generator_tokenizer
        completion = results.Completion(
            self.settings.model, index.version, asked.prompt, logprobs, tokenizer,
            lambda answer: results.citations(answer, str(request.base_url), index.name))
        if stream:
            chunks = self._chunks(request, index, asked, began,
                                  results.Chunks(completion, asked.ask, usage))
            return _Events(await anext(chunks), chunks, self._failure)
        answers = await self._computed(request, index, asked.program, asked.questions)
        return JSONResponse(completion.whole(self._choices(index, asked, answers, began)))

    def _asked(self, fields: Fields, question: str) -> tuple[asking.Asked, OpenIndex]:
        """What is to be answered, and from which index."""
        asked = asking.asked(fields, question, self.settings, self.indexes.config.eval)
        index = self.indexes.named(asked.memory)
        tokens, = index.rag.job.prepared.generator_tokenizer.encode([question])
        return asked._replace(prompt=len(tokens)), index

    def _choices(self, index: OpenIndex, asked: asking.Asked, answers: Sequence[Answer],
                 began: float, first: float | None = None) -> list[results.Choice]:
        """The answers as they were asked for, counted.

        began, first: when the request came, and when the first token was sent; None = now.
        """
        now, tokenizer = time.perf_counter(), index.rag.job.prepared.generator_tokenizer
        choices = results.choices(asked.ask, answers, tokenizer, index.rag.config.kind)
        self.metrics.prompt.inc(asked.prompt)
        self.metrics.first_token.observe((first or now) - began)
        self.metrics.whole.observe(now - began)
        for choice in choices:
            self.metrics.generated.inc(choice.spent)
            self.metrics.ended(choice.reason)
        return choices

    async def _chunks(self, request: Request, index: OpenIndex, asked: asking.Asked, began: float,
                      chunks: results.Chunks) -> AsyncIterator[dict[str, Any]]:
        """Chunks of a completion, as its answers grow."""
        loop, first = asyncio.get_running_loop(), None
        listener = Listener(loop.time() + self.settings.timeout)
        questions = [question._replace(listener=listener) for question in asked.questions]
        computed = asyncio.ensure_future(self._computed(request, index, asked.program, questions))
        computed.add_done_callback(lambda done: (
            listener.end(), done.cancelled() or done.exception()))  # logs none
        try:
            async for place, begun in listener:
                for chunk in chunks.more(place, begun):
                    first = first or time.perf_counter()
                    yield chunk
            for chunk in chunks.rest(self._choices(index, asked, await computed, began, first)):
                yield chunk
        finally:
            listener.left = True
            computed.cancel()

    async def _embed(self, request: Request) -> Response:
        fields = await self._body(request)
        fields.only(("model", "input", "encoding_format", "dimensions", "user"))
        tower = asking.known_model(fields, self._models) or "query_encoder"
        texts = fields.strings("input", self.settings.max_texts, self.settings.max_question)
        index = self.indexes.current
        if fields.has("dimensions"):
            retriever = index.rag.config.model.retriever
            width = retriever.projection or retriever.width
            fields.only(fields.fields, {"dimensions": (width,)})
        encoding = fields.choice("encoding_format", "float", ("float", "base64"))
        given = [asking.Passage("", "", text) if tower == "document_encoder" else text
                 for text in texts]
        vectors = await self._computed(request, index, tower, given)
        tokenizer = index.rag.job.prepared.retriever_tokenizer
        tokens = sum(map(len, await asyncio.to_thread(tokenizer.encode, texts)))
        return JSONResponse({
            "object": "list", "model": fields.fields["model"],
            "data": [{"object": "embedding", "index": number,
                      "embedding": results.vector(vector, encoding)}
                     for number, vector in enumerate(vectors)],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})

    async def _rerank(self, request: Request) -> Response:
        """p(z | x) over the documents that are given, by the two encoders: the share that BM25 has
        in that of a hybrid index is counted for its passages alone."""
        fields, settings = await self._body(request), self.settings
        fields.only(("model", "query", "documents", "top_n", "return_documents"))
        asking.known_model(fields, self._models)
        query = asking.question(fields, "query", settings)
        documents = asking.documents(fields, settings.max_texts, settings.max_question)
        top = fields.number("top_n", len(documents), 1, 2**31, whole=True)
        told, index = fields.flag("return_documents"), self.indexes.current
        (vector,), vectors = await asyncio.gather(
            self._computed(request, index, "query_encoder", [query]),
            self._computed(request, index, "document_encoder", documents))
        p = results.softmax(np.stack(vectors) @ vector)
        return JSONResponse({"id": uuid.uuid4().hex, "results": [
            {"index": int(row), "relevance_score": float(p[row]),
             **({"document": {"text": documents[row].text}} if told else {})}
            for row in np.argsort(-p, kind="stable")[:top]]})

    # --- ours -----------------------------------------------------------------------------------

    async def _answer(self, request: Request) -> Response:
        began, fields = time.perf_counter(), await self._body(request)
        fields.only(("question", *asking.HOW))
        question = asking.question(fields, "question", self.settings)
        asked, index = self._asked(fields, question)
        choices = self._choices(index, asked, await self._computed(
            request, index, asked.program, asked.questions), began)
        first, *others = [{"answer": choice.answer.text, "finish_reason": choice.reason,
                           **results.answer_record(choice.answer)} for choice in choices]
        return JSONResponse({"memory": index.name, "version": index.version, **first,
                             "alternatives": others})

    async def _retrieve(self, request: Request) -> Response:
        fields = await self._body(request)
        fields.only(("question", "k", "memory"))
        question = asking.question(fields, "question", self.settings)
        index = self.indexes.named(fields.text("memory") if fields.has("memory") else None)
        if not index.most:
            raise Refused("this model reads no passages: there is nothing to retrieve")
        k = fields.number("k", index.k, 1, index.most, whole=True)
        found, = await self._computed(request, index, "retrieve", [(question, k)])
        return JSONResponse({"memory": index.name, "version": index.version,
                             "passages": list(map(results.passage, found))})

    async def _passage(self, request: Request) -> Response:
        """What a citation's url leads to."""
        name, named = request.path_params["index"], request.path_params["id"]
        index = self.indexes.open.get(name)
        store = index and index.rag.index and index.rag.index.passages
        row = store and await asyncio.to_thread(store.find, named)
        if row is None:
            raise Refused(f"no passage {named[:60]!r} in an open memory {name[:60]!r}", 404)
        return JSONResponse(results.passage(Evidence(
            *store[row], None, source=store.source(row))))

    async def _list_memory(self, request: Request) -> Response:
        indexes = self.indexes
        current, config = indexes.current, indexes.config
        most = min(asking.most_answers(config.eval), self.settings.max_choices)
        return JSONResponse({
            "current": current.name, "version": current.version, "open": sorted(indexes.open),
            "there": list(indexes.paths), "programs": current.programs, "answers": most})

    async def _change_memory(self, request: Request) -> Response:
        """Swaps the index, or edits it; what has begun runs to its end."""
        fields, settings = await self._body(request), self.settings
        swap, edit = fields.has("swap"), fields.filled("add") or fields.filled("delete")
        fields.only(("swap", "add", "delete", "memory"))
        if swap == edit or swap and fields.has("memory"):
            raise Refused("request: expected \"swap\" alone, or one of \"add\" and \"delete\" or "
                          "both, perhaps with \"memory\"")
        if swap:
            change = self.indexes.swap(fields.text("swap"))
        else:
            change = self.indexes.edit(
                asking.passages(fields, "add", settings.max_texts, settings.max_body),
                fields.strings("delete", settings.max_texts, settings.max_body)
                if fields.filled("delete") else (),
                fields.text("memory") if fields.has("memory") else None)
        try:
            await asyncio.shield(asyncio.wrap_future(change))
        finally:
            del change  # of an error that it holds, the traceback holds this, and an open index
        return await self._list_memory(request)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _health(self, request: Request) -> Response:
        failed = self.worker.failure is not None
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    async def _ready(self, request: Request) -> Response:
        ready = self.worker.ready
        return JSONResponse({"ready": ready, "compiled": self.worker.compiled,
                             "programs": self._to_compile}, 200 if ready else 503)


class _Counted:
    """Middleware around all others, which answer some requests themselves.

    Args:
      answered: is given the status of every request whose path is not one of UNCOUNTED.
    """

    def __init__(self, app: ASGIApp, answered: Callable[[int], None]):
        self._app, self._answered = app, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answered(message["status"])
            await send(message)

        counts = scope["type"] == "http" and scope["path"] not in UNCOUNTED
        await self._app(scope, receive, counting if counts else send)


async def _left(request: Request) -> None:
    """Returns once the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Events(StreamingResponse):
    """Chunks as server-sent events; one that says what has failed is the last.

    Args:
      first, chunks: the first of the chunks, and the generator of the others.
      failure: what is said of an error.
    """

    def __init__(self, first: dict[str, Any], chunks: AsyncGenerator[dict[str, Any]],
                 failure: Callable[[BaseException], Response]):
        super().__init__(self._events(), media_type="text/event-stream",
                         headers={"Cache-Control": "no-cache"})
        self._first, self._chunks, self._failure = first, chunks, failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._chunks):  # at once, where the client has left
            with contextlib.suppress(asyncio.CancelledError):  # the end, which the last event tells
                await super().__call__(scope, receive, send)

    async def _events(self) -> AsyncIterator[str]:
        yield _event(self._first)
        try:
            async for chunk in self._chunks:
                yield _event(chunk)
        except ClientDisconnect:
            return
        except (Exception, asyncio.CancelledError) as error:
            yield _event(json.loads(self._failure(error).body))
        else:
            yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    """In ASCII: of text, more than newlines end a line (U+2028), which not every client knows."""
    return f"data: {json.dumps(data)}\n\n"


def _error(message: str, status: int, field: str | None = None) -> Response:
    """An error in OpenAI's form."""
    headers = {429: {"Retry-After": "1"}, 503: {"Retry-After": "5"},
               401: {"WWW-Authenticate": "Bearer"}}.get(status)
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return JSONResponse({"error": {"message": message, "type": kind, "param": field,
                                   "code": None}}, status, headers)


def _without_paths(message: str, known: Sequence[pathlib.Path]) -> str:
    """Without the folders of this machine that an error may name: of each path, its last part; of
    a version of an index, the index's name. Names of those `known` may hold spaces and the like."""
    names = {str(path): path.name for path in known}
    longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))

    def last_part(found: re.Match) -> str:
        path, rest = found.groups()
        if path in names and re.fullmatch(r"(/versions/\d+)?", rest):
            return names[path]
        return rest.rpartition("/")[2] or found[0]

    # What an id or a URL has before its first slash, no absolute path has.
    return re.sub(rf"(?<![\w./-])({longest_first}|{PART})((?:{PART})*)", last_part, message)
