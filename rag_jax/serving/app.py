"""The server's routes: authentication, time limits, and what each route computes and returns."""

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rag_jax.retrieval.protocol import Passage
from rag_jax.serving import asking, failures, page, results
from rag_jax.serving.batching import Worker
from rag_jax.serving.events import Events
from rag_jax.serving.fields import Fields, Refused, parse
from rag_jax.serving.indexes import Indexes, OpenIndex
from rag_jax.serving.listening import Listener
from rag_jax.serving.metrics import Metrics
from rag_jax.serving.settings import Settings
from rag_jax.types import Answer, Evidence

Handler = Callable[[Request], Awaitable[Response]]
CHARACTERS = 64  # of a document to rank that are tokenized, for each token that is read
CLIENT_LEFT = 499  # a status for the metrics alone
UNCOUNTED = {"/health", "/ready", *(f"/{path}" for path in page.FILES)}


class _Any(PathConvertor):
    """The rest of a path; a newline, which the id of a passage may hold, does not end it."""

    regex = "(?s:.*)"


class _Named(_Any):
    """The same, where it is not empty."""

    regex = "(?s:.+)"


register_url_convertor("any", _Any())
register_url_convertor("named", _Named())


class Server:
    """The application: `app` is what an ASGI server runs.

    Args:
      indexes: the open indexes, whose programs the worker compiles.
      settings: limits and names.
      compiled, started: as `Worker` calls them.

    Attributes:
      to_compile: how many programs the worker compiles at the start.
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
        self.to_compile = len(settings.batch_sizes) * sum(
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
            Route("/v1/models/{model:named}", self._guarded(self._show_model), methods=get),
            Route("/memory", self._guarded(self._list_memory), methods=get),
            Route("/memory", self._guarded(self._change_memory, changes=True), methods=post),
            Route("/metrics", self._guarded(self._metrics), methods=get),
            Route("/health", self._health, methods=get),
            Route("/ready", self._ready, methods=get),
            *page.routes(),
        ]
        # On a server for this machine alone, a request is refused whose Host header is another
        # name: a web page whose name resolves to this machine would send it. An address of IPv6
        # stands in brackets there.
        hosts = (["localhost", "127.0.0.1", "[::1]", settings.host, f"[{settings.host}]"]
                 if settings.local else ["*"])
        self.app = Starlette(
            routes=routes, lifespan=self._life, exception_handlers={HTTPException: self._no_route},
            middleware=[Middleware(_Counted, self.metrics.answered),
                        Middleware(TrustedHostMiddleware, allowed_hosts=hosts)])

    @contextlib.asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        self.worker.start()
        yield
        await asyncio.to_thread(self.worker.close)
        self.indexes.close()

    # --- every request --------------------------------------------------------------------------

    def _guarded(self, handler: Handler, changes: bool = False) -> Handler:
        """The handler behind a check of the token and a time limit, with every error as JSON.

        changes: it changes what is answered from. That needs `memory_token`, and has no time limit,
          as a change goes on whether or not its client waits.
        """
        async def guarded(request: Request) -> Response:
            try:
                self._authenticate(request, changes)
                async with asyncio.timeout(None if changes else self.settings.timeout):
                    response = await handler(request)
            except ClientDisconnect:
                response = Response(status_code=CLIENT_LEFT)
            except (Exception, asyncio.CancelledError) as error:
                response = self._failure(error)
            return response

        return guarded

    def _failure(self, error: BaseException) -> Response:
        return failures.response_to(error, self.indexes, self.settings.timeout)

    async def _no_route(self, request: Request, error: HTTPException) -> Response:
        """The response where no route has this path, or none of that path takes this method."""
        response = failures.response(f"{request.method} {request.url.path:.100}: {error.detail}",
                                     error.status_code)
        if error.status_code == 405:  # the router names only the methods of the first such route
            response.headers["Allow"] = ", ".join(sorted(set().union(
                *(route.methods for route in self.app.routes
                  if route.matches(request.scope)[0] is not Match.NONE))))
        return response

    def _authenticate(self, request: Request, changes: bool) -> None:
        token = (changes and self.settings.memory_token) or self.settings.token
        if changes and not token:
            raise Refused("/memory: changes need a token, and this server was given none: start it "
                          "with RAG_JAX_MEMORY_TOKEN or RAG_JAX_TOKEN", 403)
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if token and not (kind.lower() == "bearer" and secrets.compare_digest(
                given.strip().encode("latin-1"), token.encode())):
            raise Refused(f"{'another' if given else 'a'} token is needed: Authorization: Bearer "
                          "TOKEN", 401)

    async def _body(self, request: Request) -> Fields:
        """The JSON object of a request; its body has at most `max_body` bytes."""
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
                        inputs: Sequence[Any]) -> list[Any]:
        """The worker's results, one for each of `inputs`.

        Raises:
          ClientDisconnect: the client has left; what is not computed yet will not be.
        """
        futures = self.worker.submit(index, program, inputs)
        computed = asyncio.gather(*map(asyncio.wrap_future, futures))
        computed.add_done_callback(_retrieve_error)
        left = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait((computed, left), return_when=asyncio.FIRST_COMPLETED)
            if not computed.done():
                raise ClientDisconnect
            return computed.result()
        finally:
            left.cancel()
            # Cancelled through `computed`, they would be cancelled one turn of the loop later.
            for future in futures:
                future.cancel()

    # --- routes of other APIs (OpenAI's, Cohere's) ------------------------------------------------

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [*map(self._shown, self._models)]})

    async def _show_model(self, request: Request) -> Response:
        asking.known_model(Fields("request", request.path_params), self._models)
        return JSONResponse(self._shown(request.path_params["model"]))

    def _shown(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "rag_jax"}

    async def _chat(self, request: Request) -> Response:
        began, fields = time.perf_counter(), await self._body(request)
        fields.only(asking.CHAT, asking.NEUTRAL)
        if asking.known_model(fields, self._models) is not None:
            raise Refused("request: \"model\" embeds texts: ask it at /v1/embeddings", 404, "model")
        question = asking.chat_question(fields, self.settings)
        logprobs, stream, usage = fields.flag("logprobs"), fields.flag("stream"), False
        if fields.has("stream_options"):
            options = Fields("request: stream_options", fields.fields["stream_options"])
            usage = options.flag("include_usage")
            options.only(("include_usage", "include_obfuscation"))
        asked, index = self._asked(fields, question)
        completion = results.Completion(
            self.settings.model, index.version, asked.prompt, index.rag.matches(question), logprobs,
            index.tokenizer,
            lambda answer: results.citations(answer, str(request.base_url), index.name))
        if stream:
            chunks = self._chunks(request, index, asked, began,
                                  results.Chunks(completion, asked.ask, usage))
            return Events(await anext(chunks), chunks, self._failure)
        answers = await self._computed(request, index, asked.program, asked.questions)
        return JSONResponse(completion.whole(self._choices(index, asked, answers, began)))

    def _asked(self, fields: Fields, question: str) -> tuple[asking.Asked, OpenIndex]:
        """What is to be answered, and from which index."""
        asked = asking.asked(fields, question, self.settings, self.indexes.config.eval)
        index = self.indexes.named(fields.optional("memory"))
        tokens, = index.tokenizer.encode([question])
        return asked._replace(prompt=len(tokens)), index

    def _choices(self, index: OpenIndex, asked: asking.Asked, answers: Sequence[Answer],
                 began: float, first: float | None = None) -> list[results.Choice]:
        """The answers, cut as the request asks, and counted in the metrics.

        began, first: `time.perf_counter()` when the request came, and when its first token was sent
          (None = now).
        """
        now = time.perf_counter()
        choices = results.choices(asked.ask, answers, index.tokenizer, index.rag.config.kind)
        self.metrics.prompt.inc(asked.prompt)
        self.metrics.first_token.observe((first or now) - began)
        self.metrics.whole.observe(now - began)
        for choice in choices:
            self.metrics.generated.inc(choice.spent)
            self.metrics.ended(choice.reason)
        return choices

    async def _chunks(self, request: Request, index: OpenIndex, asked: asking.Asked, began: float,
                      chunks: results.Chunks) -> AsyncIterator[dict[str, Any]]:
        """Chunks of a completion, each as soon as its tokens are decoded."""
        loop, first = asyncio.get_running_loop(), None
        listener = Listener(loop.time() + self.settings.timeout)
        questions = [question._replace(listener=listener) for question in asked.questions]
        computed = asyncio.ensure_future(self._computed(request, index, asked.program, questions))
        computed.add_done_callback(lambda done: listener.end())
        computed.add_done_callback(_retrieve_error)
        try:
            async for number, begun in listener:
                for chunk in chunks.more(number, begun):
                    first = first or time.perf_counter()
                    yield chunk
            for chunk in chunks.rest(self._choices(index, asked, await computed, began, first)):
                yield chunk
        finally:
            listener.left = True
            computed.cancel()

    async def _embed(self, request: Request) -> Response:
        fields, index = await self._body(request), self.indexes.current
        fields.only(("model", "input", "encoding_format", "dimensions", "user"))
        tower = asking.known_model(fields, self._models) or "query_encoder"
        texts = fields.strings("input", self.settings.max_texts, self.settings.max_question)
        blank = next((number for number, text in enumerate(texts, 1) if not text.strip()), None)
        if blank is not None:
            raise fields.error("input", f"texts that are not blank, as text {blank} is")
        retriever = index.rag.config.model.retriever
        fields.only(fields.fields, {"dimensions": (retriever.projection or retriever.width,)})
        encoding = fields.choice("encoding_format", "float", ("float", "base64"))
        inputs = [asking.Passage("", "", text) if tower == "document_encoder" else text
                 for text in texts]
        vectors = await self._computed(request, index, tower, inputs)
        tokenizer = index.rag.job.prepared.retriever_tokenizer
        tokens = sum(map(len, await asyncio.to_thread(tokenizer.encode, texts)))
        return JSONResponse({
            "object": "list", "model": fields.fields["model"],
            "data": [{"object": "embedding", "index": number,
                      "embedding": results.vector(vector, encoding)}
                     for number, vector in enumerate(vectors)],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})

    async def _rerank(self, request: Request) -> Response:
        """p(z | x) over the documents of the request, by the two encoders alone, also where the
        index is hybrid: BM25 scores only the passages of its index."""
        fields, settings = await self._body(request), self.settings
        fields.only(("model", "query", "documents", "top_n", "return_documents",
                     "max_tokens_per_doc"), {"priority": (0,)})
        asking.known_model(fields, self._models)
        query = asking.question(fields, "query", settings)
        documents = asking.documents(fields, settings.max_texts)
        top = fields.number("top_n", len(documents), 1, 2**31, whole=True)
        with_texts, index = fields.flag("return_documents"), self.indexes.current
        longest = index.rag.config.data.max_passage_length  # some clients send Cohere's, 4096
        fields.number("max_tokens_per_doc", longest, longest, 2**31, whole=True)
        # All that is given is tokenized, though no more than `longest` tokens are read.
        begun = [Passage(*(part[: CHARACTERS * longest] for part in each)) for each in documents]
        (vector,), vectors = await asyncio.gather(
            self._computed(request, index, "query_encoder", [query]),
            self._computed(request, index, "document_encoder", begun))
        p = results.softmax(np.stack(vectors) @ vector)
        return JSONResponse({"id": uuid.uuid4().hex, "results": [
            {"index": int(row), "relevance_score": float(p[row]),
             **({"document": {"text": documents[row].text}} if with_texts else {})}
            for row in np.argsort(-p, kind="stable")[:top]]})

    # --- routes of this server alone --------------------------------------------------------------

    async def _answer(self, request: Request) -> Response:
        began, fields = time.perf_counter(), await self._body(request)
        fields.only(("question", *asking.HOW))
        question = asking.question(fields, "question", self.settings)
        asked, index = self._asked(fields, question)
        choices = self._choices(index, asked, await self._computed(
            request, index, asked.program, asked.questions), began)
        first, *others = [{"answer": choice.answer.text, "finish_reason": choice.reason,
                           **results.answer_record(choice.answer)} for choice in choices]
        return JSONResponse({"memory": index.name, "version": index.version,
                             "matched": index.rag.matches(question), **first,
                             "alternatives": others})

    async def _retrieve(self, request: Request) -> Response:
        fields = await self._body(request)
        fields.only(("question", "k", "memory"))
        question = asking.question(fields, "question", self.settings)
        index = self.indexes.named(fields.optional("memory"))
        if not index.most:
            raise Refused("this model reads no passages: there is nothing to retrieve")
        k = fields.number("k", index.k, 1, index.most, whole=True)
        passages, = await self._computed(request, index, "retrieve", [(question, k)])
        return JSONResponse({"memory": index.name, "version": index.version,
                             "matched": index.rag.matches(question),
                             "passages": list(map(results.passage, passages))})

    async def _passage(self, request: Request) -> Response:
        """The passage that the url of a citation names."""
        name, passage_id = request.path_params["index"], request.path_params["id"]
        index = self.indexes.open.get(name)
        store = index and index.rag.index and index.rag.index.passages
        row = store and await asyncio.to_thread(store.find, passage_id)
        if row is None:
            raise Refused(f"no passage {passage_id[:60]!r} in an open memory {name[:60]!r}", 404)
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
        """Swaps the current index, or edits one; requests that have begun keep theirs."""
        fields, settings = await self._body(request), self.settings
        swap, edit = fields.has("swap"), fields.filled("add") or fields.filled("delete")
        fields.only(("swap", "add", "delete", "memory"))
        if swap == edit or swap and fields.has("memory"):
            raise Refused("request: expected \"swap\" alone, or one of \"add\" and \"delete\" or "
                          "both, perhaps with \"memory\"")
        self.worker.check_ready()  # a change would compile beside the start, for as long
        if swap:
            change = self.indexes.swap(fields.text("swap"))
        else:
            change = self.indexes.edit(
                asking.passages(fields, "add", settings.max_texts, settings.max_body),
                fields.strings("delete", settings.max_texts, settings.max_body)
                if fields.filled("delete") else (),
                fields.optional("memory"))
        try:
            await asyncio.shield(asyncio.wrap_future(change))
        finally:
            # An error in it has a traceback that refers to this frame, and so to `change` again: a
            # cycle, which would keep an index open.
            del change
        return await self._list_memory(request)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _health(self, request: Request) -> Response:
        failed = self.worker.failure is not None
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    async def _ready(self, request: Request) -> Response:
        ready = self.worker.ready
        return JSONResponse({"ready": ready, "compiled": self.worker.compiled,
                             "programs": self.to_compile}, 200 if ready else 503)


class _Counted:
    """The outermost middleware, as the inner ones also answer some requests themselves.

    Args:
      answered: called with the status of every request whose path is not one of UNCOUNTED.
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
    """Returns once the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _retrieve_error(done: asyncio.Future) -> None:
    """Retrieves the error of a future, if it has one: asyncio logs errors that nobody retrieved."""
    if not done.cancelled():
        done.exception()
