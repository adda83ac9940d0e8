"""The responses to requests that failed, in OpenAI's form of an error."""

import asyncio
import pathlib
import re
import sys
import traceback
from collections.abc import Sequence

from starlette.responses import JSONResponse, Response

from rag_jax.errors import UserError
from rag_jax.locks import InUseError
from rag_jax.retrieval.protocol import PassageIdError
from rag_jax.serving.fields import Refused
from rag_jax.serving.indexes import Indexes

ENDING = "the server is ending: what it has not answered by now it does not answer"
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         429: "rate_limit_error"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"},
           503: {"Retry-After": "5"}}
PART = r"/[^\s/:;,'\"]+"  # of a path


def response(message: str, status: int, field: str | None = None) -> Response:
    """An error with this message; `field` is the wrong field of the request, if it is one."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return JSONResponse({"error": {"message": message, "type": kind, "param": field,
                                   "code": None}}, status, HEADERS.get(status))


def response_to(error: BaseException, indexes: Indexes, timeout: float) -> Response:
    """The response to a request whose handler raised `error`; it names no folder of this machine.

    Args:
      indexes: whose folders a message may name.
      timeout: seconds that a request may take.
    """
    if isinstance(error, asyncio.CancelledError):  # the grace period ended before the request
        return response(ENDING, 503)
    if isinstance(error, Refused):  # quotes only what the client sent: no folder to remove
        return response(str(error), error.status, error.field)
    if isinstance(error, UserError):
        folders = [indexes.current.rag.job.workdir.absolute(), *indexes.paths.values()]
        unknown = not isinstance(error, PassageIdError)  # else it quotes ids, some like paths
        return response(_without_paths(str(error), folders, unknown),
                        503 if isinstance(error, InUseError) else 422)
    if isinstance(error, TimeoutError):
        return response(f"no answer within {timeout:g} seconds", 504)
    if isinstance(error, OSError) and error.strerror:  # a full disk, too many open files, ...
        print(f"error: {error}", file=sys.stderr)
        return response(f"the server's machine: {error.strerror}", 503)
    traceback.print_exception(error, file=sys.stderr)
    return response("a defect of the server, which its log describes", 500)


def _without_paths(message: str, folders: Sequence[pathlib.Path], unknown: bool = True) -> str:
    """The message with each path of this machine replaced by the last part of the path, and the
    folder of an index's version by the name of the index. The paths of `folders` may hold spaces
    and punctuation; other paths end there.

    unknown: also replace paths that are in none of `folders`.
    """
    names = {str(path): path.name for path in folders}
    longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))

    def last_part(match: re.Match) -> str:
        path, rest = match.groups()
        if path in names and re.fullmatch(r"(/versions/\d+)?", rest):
            return names[path]
        return rest.rpartition("/")[2] or match[0]

    # The first slash of an id or a URL follows other characters; that of an absolute path does not.
    first = f"{longest_first}|{PART}" if unknown else longest_first
    return re.sub(rf"(?<![\w./-])({first})((?:{PART})*)", last_part, message)
