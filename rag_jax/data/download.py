"""Downloads: with progress, taken up where they broke off, verified, published by rename."""

import email.message
import hashlib
import http.client
import itertools
import os
import pathlib
import re
import sys
import urllib.error
import urllib.parse
import urllib.request

import filelock
from tqdm import tqdm

from rag_jax import files
from rag_jax.errors import UserError
from rag_jax.visible import is_terminal

_CHUNK = 1 << 20  # bytes
_TIMEOUT = 30.0  # seconds without any data
_ATTEMPTS = 5  # connections, each going on where the last one broke off


class DownloadError(UserError, RuntimeError):
    """A file that could not be had; the message names URL and place, and what to do."""


def download(url: str, path: pathlib.Path, size: int | None = None,
             sha256: str | None = None) -> None:
    """Fetches a file; `path` appears when it is whole and verified.

    What has come so far lies in PATH.part, and a further call asks for the rest alone (HTTP range),
    if the server still has the same version, by the size and the ETag or date in
    PATH.part.version. Nothing is received beyond the size that is published or announced. Of
    several processes that want a file one fetches it, holding PATH.part.lock; the others wait.

    Args:
        url: http or https, and only there redirections lead (from https to https alone).
        path: place of the finished file, where there is none yet; its folder is made.
        size: bytes, where known.
        sha256: checksum (hex), where known.

    Raises:
        DownloadError: no connection, an HTTP error, or a file of another size or checksum.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    version, lock = (part.with_name(part.name + end) for end in (".version", ".lock"))
    with filelock.FileLock(lock):
        try:
            if path.exists():  # another process has fetched it
                return
            total = _receive_all(url, part, version, size)
            _verify(url, part, total if size is None else size, sha256)
            files.move(part, path)
            version.unlink(missing_ok=True)
        finally:
            lock.unlink(missing_ok=True)  # who waits makes it anew


def _receive_all(url: str, part: pathlib.Path, version: pathlib.Path, size: int | None
                 ) -> int | None:
    """Receives a file by as many connections as it takes; its size as the server says."""
    for attempt in itertools.count(1):
        had = _size(part)
        try:
            return _fetch(url, part, version, size)
        except (OSError, http.client.HTTPException) as error:
            refused = isinstance(error, urllib.error.URLError) or _size(part) <= had
            if refused or attempt == _ATTEMPTS:
                raise DownloadError(
                    f"{url} could not be downloaded to {part.with_suffix('')} ({error}). Run the "
                    "same command again to go on; or fetch the file where there is a network and "
                    "put it there"
                ) from error


def _size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


class _WebOnly(urllib.request.HTTPRedirectHandler):
    """Follows redirections to the web alone, and from https to https alone: the library's own
    handler follows to ftp too."""

    def redirect_request(self, request, response, code, message, headers, new_url):
        allowed = ("https",) if request.type == "https" else ("http", "https")
        if urllib.parse.urlsplit(new_url).scheme not in allowed:
            raise urllib.error.URLError(
                f"it leads on to {new_url!r}; only {' and '.join(allowed)} are followed")
        return super().redirect_request(request, response, code, message, headers, new_url)


def _open(url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise urllib.error.URLError("only http and https are fetched")
    opener = urllib.request.build_opener(_WebOnly)
    return opener.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)


def _fetch(url: str, part: pathlib.Path, version: pathlib.Path, size: int | None) -> int | None:
    """Appends the rest of a file to its part, and returns the size that the server says it has.

    Raises:
        OSError, http.client.HTTPException: no connection, or one that broke off.
        DownloadError: the server's file has another size than the published one.
    """
    had = _size(part)
    headers = {"User-Agent": "rag_jax"}
    tag, before = _version(version)
    if had and tag:
        headers |= {"Range": f"bytes={had}-", "If-Range": tag}
    try:
        response = _open(url, headers)
    except urllib.error.HTTPError as error:
        # The range may begin at the end: then the last call was stopped before the renaming.
        if error.code != 416 or "Range" not in headers:
            raise
        if error.headers.get("Content-Range", "") == f"bytes */{had}":
            return had
        _start_again(part, version)
        return _fetch(url, part, version, size)
    with response:
        goes_on, came = response.status == 206, response.headers
        start, total = _range(came) if goes_on else (0, came.get("Content-Length"))
        total = int(total) if total and total.isdecimal() else None
        changed = goes_on and (start != had or before not in (None, total)
                               or _tag(came) not in ("", tag))
        if changed and "Range" in headers:  # another version, whatever the range asked for
            _start_again(part, version)
            return _fetch(url, part, version, size)
        if changed or (size is not None and total not in (None, size)):
            raise DownloadError(f"{url}: the server has {total} bytes from {start} on, where "
                                f"{size} from {had} on were expected: the file has changed at its "
                                "source, or something stands in between. Fetch it by hand")
        if not goes_on:
            _start_again(part, version)  # a part of another version must never have this one's tag
            version.write_text(f"{_tag(came)}\n{'' if total is None else total}", "latin-1")
        _receive(response, part, "ab" if goes_on else "wb", total, size)
    if total is not None and _size(part) < total:
        raise http.client.IncompleteRead(b"", total - _size(part))
    return total


def _start_again(part: pathlib.Path, version: pathlib.Path) -> None:
    part.unlink(missing_ok=True)
    version.unlink(missing_ok=True)


def _receive(response: http.client.HTTPResponse, part: pathlib.Path, mode: str,
             total: int | None, size: int | None) -> None:
    """Writes what comes, and at most one byte more than there should be."""
    start = _size(part) if mode == "ab" else 0
    limit = total if size is None else size
    with (part.open(mode) as file,
          tqdm(total=total, initial=start, unit="B", unit_scale=True, desc=part.stem,
               disable=not is_terminal(sys.stderr)) as progress):
        while limit is None or file.tell() <= limit:
            wanted = _CHUNK if limit is None else min(_CHUNK, limit + 1 - file.tell())
            data = response.read(wanted)
            if not data:
                break
            file.write(data)
            progress.update(len(data))
        file.flush()
        os.fsync(file.fileno())


def _tag(headers: email.message.Message) -> str:
    """What tells one version of a file from another: its ETag, or else its date."""
    tag = headers.get("ETag") or ""
    tag = "" if tag.startswith("W/") else tag  # weak ones say nothing about bytes
    return tag or headers.get("Last-Modified") or ""


def _version(file: pathlib.Path) -> tuple[str, int | None]:
    """(tag, size) of the version that a part belongs to."""
    text = file.read_text("latin-1") if file.exists() else ""  # as headers are
    tag, _, size = text.partition("\n")
    return tag, int(size) if size.isdecimal() else None


def _range(headers: email.message.Message) -> tuple[int | None, str | None]:
    """(first byte, size of the whole) by Content-Range; None = it does not say."""
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range") or "")
    return (int(match[1]), match[2]) if match else (None, None)


def _verify(url: str, part: pathlib.Path, size: int | None, sha256: str | None) -> None:
    """Removes a file that is not what it should be, and raises DownloadError."""
    actual = {"bytes": _size(part)}
    expected = {"bytes": size}
    if sha256 is not None:
        with part.open("rb") as file:
            actual["SHA-256"] = hashlib.file_digest(file, "sha256").hexdigest()
        expected["SHA-256"] = sha256
    for kind, value in expected.items():
        if value is not None and actual[kind] != value:
            part.unlink()
            raise DownloadError(
                f"{url}: {kind} {actual[kind]} where {value} was expected; what came was removed. "
                "Run the same command again; if it fails again, the file has changed at its source"
            )
