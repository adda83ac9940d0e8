"""The page at /: three files of the package, sent with headers that restrict what they may do."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rag_jax import package_data

FILES = {"": ("page.html", "text/html"), "page.css": ("page.css", "text/css"),
         "page.js": ("page.js", "text/javascript")}
# Scripts, styles and requests go to this server alone; HTML holds no script, style or handler; no
# other page may show this one in a frame.
HEADERS = {
    "Content-Security-Policy":
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def routes() -> list[Route]:
    """A route for each file. They need no token, as the files hold no data."""
    return [_route(path, *file) for path, file in FILES.items()]


def _route(path: str, name: str, kind: str) -> Route:
    content = package_data.text(__package__, name)

    async def give(request: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return Route(f"/{path}", give, methods=["GET"])
