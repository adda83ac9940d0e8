"""Downloads from a server on this machine that breaks off, resumes, changes and lies."""

import contextlib
import hashlib
import http.server
import threading
import urllib.request

import pytest

from rag_jax.data import download as module
from rag_jax.data.download import DownloadError, download

CONTENT = bytes(range(256)) * 40
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves `content` at any path; `breaks` = bytes after which the next answers break off."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.tag, self.breaks, self.ranges = CONTENT, '"v1"', [], []
        self.accepts_ranges, self.ignores_if_range, self.sends_length = True, False, True
        self.shift, self.leads_to = 0, None  # where ranges begin beside what was asked; Location

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/data.bin"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):  # noqa: N802 (the library's name)
        server, wanted = self.server, self.headers.get("Range")
        server.ranges.append(wanted)
        if self.path == "/missing":
            self.send_error(404)
            return
        if server.leads_to:
            self.send_response(302)
            self.send_header("Location", server.leads_to)
            self.end_headers()
            return
        start, same = 0, self.headers["If-Range"] == server.tag or server.ignores_if_range
        if wanted and server.accepts_ranges and same:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(server.content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(server.content)}")
                self.end_headers()
                return
            start += server.shift
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(server.content) - 1}/"
                             f"{len(server.content)}")
        else:
            self.send_response(200)
        body = server.content[start:]
        if server.tag:
            self.send_header("ETag", server.tag)
        if server.sends_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # who is sent too much leaves
            self.wfile.write(body[: server.breaks.pop(0)] if server.breaks else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_comes_whole_and_alone(server, tmp_path):
    path = tmp_path / "new" / "data.bin"
    download(server.url, path, len(CONTENT), SHA256)
    assert path.read_bytes() == CONTENT and names(path.parent) == ["data.bin"]
    assert server.ranges == [None]


def test_a_broken_connection_goes_on_where_it_broke(server, tmp_path):
    server.breaks = [1000, 2000]
    download(server.url, tmp_path / "data.bin", None, SHA256)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=1000-", "bytes=3000-"]


def test_a_later_call_goes_on_where_the_first_gave_up(server, tmp_path):
    """Gigabytes over a bad line: what has come stays, and is asked for no more."""
    server.breaks = [100] * 5
    with pytest.raises(DownloadError, match="Run the same command again to go on"):
        download(server.url, tmp_path / "data.bin", None, SHA256)
    assert names(tmp_path) == ["data.bin.part", "data.bin.part.version"]
    assert (tmp_path / "data.bin.part").read_bytes() == CONTENT[:500]
    server.ranges.clear()
    download(server.url, tmp_path / "data.bin", None, SHA256)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT and names(tmp_path) == ["data.bin"]
    assert server.ranges == ["bytes=500-"]


@pytest.mark.parametrize("change", ["version", "no ranges", "no version"])
def test_a_part_of_another_version_is_not_gone_on_with(server, tmp_path, change):
    """Otherwise the file would be the head of one version with the tail of another."""
    if change == "no version":
        server.tag = ""
    server.breaks = [1000] * (5 if change != "no version" else 1)
    if change == "no ranges":
        server.accepts_ranges = False
    try:
        download(server.url, tmp_path / "data.bin")
    except DownloadError:
        pass
    (tmp_path / "data.bin").unlink(missing_ok=True)
    server.breaks, server.content = [], CONTENT[::-1]
    if change == "version":
        server.tag = '"v2"'
    download(server.url, tmp_path / "data.bin")
    assert (tmp_path / "data.bin").read_bytes() == CONTENT[::-1]


def test_of_two_that_want_a_file_one_fetches_it(server, tmp_path):
    """The second went on with the first one's part, and then wrote into the finished file."""
    both = [threading.Thread(target=download, args=(
        server.url, tmp_path / "data.bin", len(CONTENT), SHA256)) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert (tmp_path / "data.bin").read_bytes() == CONTENT and names(tmp_path) == ["data.bin"]
    assert server.ranges == [None]


def test_a_kill_before_the_renaming_costs_nothing(server, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(CONTENT)
    (tmp_path / "data.bin.part.version").write_text('"v1"')
    download(server.url, tmp_path / "data.bin", len(CONTENT), SHA256)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT and names(tmp_path) == ["data.bin"]
    assert server.ranges == [f"bytes={len(CONTENT)}-"]


@pytest.mark.parametrize("version", [b"\xff\xfe", "v\u0394".encode(), b'"v2"\n\xb2'])
def test_a_part_of_a_version_that_cannot_be_read_is_begun_again(server, tmp_path, version):
    """Every later command ended in a UnicodeError."""
    (tmp_path / "data.bin.part").write_bytes(CONTENT[:9])
    (tmp_path / "data.bin.part.version").write_bytes(version)
    download(server.url, tmp_path / "data.bin", len(CONTENT), SHA256)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT and names(tmp_path) == ["data.bin"]


def test_a_kill_before_another_version_comes_leaves_no_part_of_the_first(
        server, tmp_path, monkeypatch):
    """The first one's part had the second one's tag: the next call went on with both."""
    server.breaks = [1000] * 5
    with pytest.raises(DownloadError):
        download(server.url, tmp_path / "data.bin")
    server.breaks, server.content, server.tag = [], CONTENT[::-1], '"v2"'

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, "_receive", killed)
        download(server.url, tmp_path / "data.bin")
    download(server.url, tmp_path / "data.bin")
    assert (tmp_path / "data.bin").read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("change", ["begins elsewhere", "another tag", "another size", "shorter"])
def test_a_server_that_answers_a_range_with_another_file_is_asked_for_the_whole(
        server, tmp_path, change):
    """Bytes of two versions, or from the wrong place, would make a file that is neither."""
    server.breaks = [1000] * 5
    with pytest.raises(DownloadError):
        download(server.url, tmp_path / "data.bin")
    had = (tmp_path / "data.bin.part").stat().st_size
    server.breaks, server.ignores_if_range = [], True
    if change == "begins elsewhere":
        server.shift = 7
    elif change == "another tag":
        server.content, server.tag = CONTENT[::-1], '"v2"'
    else:
        server.content = CONTENT[::-1] + b"more" if change == "another size" else CONTENT[:100]
    server.ranges.clear()
    download(server.url, tmp_path / "data.bin")
    assert (tmp_path / "data.bin").read_bytes() == server.content
    assert server.ranges == [f"bytes={had}-", None]


@pytest.mark.parametrize("sends_length", [True, False])
def test_no_more_is_received_than_is_published(server, tmp_path, monkeypatch, sends_length):
    """A server that sends without end must not fill the disk."""
    server.content, server.sends_length = CONTENT * 1000, sends_length
    monkeypatch.setattr(module, "_CHUNK", 100)
    written = []
    verify = module._verify
    monkeypatch.setattr(module, "_verify", lambda url, part, *rest: (
        written.append(part.stat().st_size), verify(url, part, *rest)))
    with pytest.raises(DownloadError, match="was expected|were expected"):
        download(server.url, tmp_path / "data.bin", 1000)
    assert written == ([] if sends_length else [1001])
    assert not (tmp_path / "data.bin").exists()


@pytest.mark.parametrize("target", ["ftp://127.0.0.1/x", "file:///etc/hostname"])
def test_redirections_lead_to_the_web_alone(server, tmp_path, target):
    """From ftp: and file: others' files would come under the name of the published one."""
    server.leads_to = target
    with pytest.raises(DownloadError, match=target.split(":")[0]):
        download(server.url, tmp_path / "data.bin")
    with pytest.raises(DownloadError, match="only http and https"):
        download(target, tmp_path / "data.bin")
    assert names(tmp_path) == []


@pytest.mark.parametrize("size, sha256, message", [
    (len(CONTENT) + 1, None, f"has {len(CONTENT)} bytes from 0 on, where {len(CONTENT) + 1} from"),
    (len(CONTENT), "0" * 64, f"SHA-256 {SHA256} where 0000"),
])
def test_a_file_that_is_not_the_one_expected_is_removed(server, tmp_path, size, sha256, message):
    with pytest.raises(DownloadError, match=message) as error:
        download(server.url, tmp_path / "data.bin", size, sha256)
    assert server.url in str(error.value)
    assert [n for n in names(tmp_path) if not n.endswith(".version")] == []


def test_no_connection_names_url_place_and_remedy(server, tmp_path):
    closed = "http://127.0.0.1:9/x.bin"
    for url, reason in ((closed, "refused"), (server.url.replace("data.bin", "missing"), "404")):
        path = tmp_path / "x.bin"
        with pytest.raises(DownloadError) as error:
            download(url, path)
        for told in (url, str(path), reason, "where there is a network and put it there"):
            assert told in str(error.value)
        assert not path.exists()
    assert len(server.ranges) == 1, "an HTTP error is not tried again"


def test_progress_is_shown_on_a_terminal(server, tmp_path, monkeypatch):
    seen = []

    class Bar:
        def __init__(self, **options):
            seen.append((options["total"], options["initial"], options["desc"]))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, count):
            seen.append(count)

    monkeypatch.setattr(module, "tqdm", Bar)
    server.breaks = [4000]
    download(server.url, tmp_path / "data.bin")
    assert seen[0] == (len(CONTENT), 0, "data.bin")
    assert (len(CONTENT), 4000, "data.bin") in seen
    assert sum(n for n in seen if isinstance(n, int)) == len(CONTENT)


def test_requests_have_a_time_limit(server, tmp_path, monkeypatch):
    asked, real = [], urllib.request.OpenerDirector.open
    monkeypatch.setattr(urllib.request.OpenerDirector, "open", lambda self, request, timeout: (
        asked.append(timeout), real(self, request))[1])
    download(server.url, tmp_path / "data.bin")
    assert asked == [module._TIMEOUT]
