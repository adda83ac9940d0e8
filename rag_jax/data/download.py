"""Downloads: with progress, taken up where they broke off, verified, published by rename."""

import hashlib
import http.client
import pathlib
import urllib.error
import urllib.request

from tqdm import tqdm

from rag_jax.errors import UserError

_CHUNK = 1 << 20  # bytes
_TIMEOUT = 30.0  # seconds without any data
_ATTEMPTS = 5  # connections, each going on where the last one broke off


class DownloadError(UserError, RuntimeError):
    """A file that could not be had; the message names URL and place, and what to do."""


def download(url: str, path: pathlib.Path, size: int | None = None,
             sha256: str | None = None) -> None:
    """Fetches a file; `path` appears when it is whole and verified.

    What has come so far lies in PATH.part, and a further call asks for the rest alone (HTTP range),
    if the server still has the same version, by the ETag or date in PATH.part.version.

    Args:
        url: http or https.
        path: where the file is to lie; its folder is made.
        size: bytes, where known.
        sha256: checksum (hex), where known.

    Raises:
        DownloadError: no connection, an HTTP error, or a file of another size or checksum.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    version = part.with_name(part.name + ".version")
    try:
        for attempt in range(1, _ATTEMPTS + 1):
            had = _size(part)
            try:
                total = _fetch(url, part, version)
                break
            except (OSError, http.client.HTTPException) as error:
                refused = isinstance(error, urllib.error.HTTPError) or _size(part) <= had
                if refused or attempt == _ATTEMPTS:
                    raise
    except (OSError, http.client.HTTPException) as error:
        raise DownloadError(
            f"{url} could not be downloaded to {path} ({error}). Run the same command again to go "
            "on; or fetch the file where there is a network and put it there"
        ) from error
    _verify(url, part, total if size is None else size, sha256)
    part.replace(path)
    version.unlink(missing_ok=True)


def _size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _fetch(url: str, part: pathlib.Path, version: pathlib.Path) -> int | None:
    """Appends the rest of a file to its part, and returns the size that the server says it has.

    Raises:
        OSError, http.client.HTTPException: no connection, or one that broke off.
    """
    had = _size(part)
    headers = {"User-Agent": "rag_jax"}
    if had and version.exists():
        headers |= {"Range": f"bytes={had}-", "If-Range": version.read_text("utf-8")}
    try:
        response = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        # The range may begin at the end: then the last call was stopped before the renaming.
        if error.code == 416 and error.headers.get("Content-Range", "") == f"bytes */{had}":
            return had
        raise
    with response:
        goes_on = response.status == 206
        if not goes_on:
            tag = response.headers.get("ETag") or ""
            tag = "" if tag.startswith("W/") else tag  # weak ones say nothing about bytes
            tag = tag or response.headers.get("Last-Modified") or ""
            version.write_text(tag, "utf-8") if tag else version.unlink(missing_ok=True)
        length = response.headers.get("Content-Length")
        start = had if goes_on else 0
        total = None if length is None else start + int(length)
        with (part.open("ab" if goes_on else "wb") as file,
              tqdm(total=total, initial=start, unit="B", unit_scale=True, disable=None,
                   desc=part.stem) as progress):
            while data := response.read(_CHUNK):
                file.write(data)
                progress.update(len(data))
    if total is not None and _size(part) < total:
        raise http.client.IncompleteRead(b"", total - _size(part))
    return total


def _verify(url: str, part: pathlib.Path, size: int | None, sha256: str | None) -> None:
    """Removes a file that is not what it should be, and raises DownloadError."""
    found = {"bytes": _size(part)}
    expected = {"bytes": size}
    if sha256 is not None:
        with part.open("rb") as file:
            found["SHA-256"] = hashlib.file_digest(file, "sha256").hexdigest()
        expected["SHA-256"] = sha256
    for kind, value in expected.items():
        if value is not None and found[kind] != value:
            part.unlink()
            raise DownloadError(
                f"{url}: {kind} {found[kind]} where {value} was expected; what came was removed. "
                "Run the same command again; if it fails again, the file has changed at its source"
            )
