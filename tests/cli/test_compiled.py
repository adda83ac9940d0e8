"""What commands compile is kept for the next one, and nothing that is torn stays."""

import contextlib
import os
import pathlib

import pytest
from jax._src.lru_cache import LRUCache

from rag_jax.cli import compiled


@pytest.mark.parametrize("given, kept", [({}, "cache/rag_jax/compiled/"),
                                         ({"JAX_COMPILATION_CACHE_DIR": "mine"}, "mine")])
def test_what_is_compiled_is_kept_where_the_user_says(given, kept, tmp_path, monkeypatch):
    """Every command compiled for seconds what the one before it had compiled."""
    monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": str(tmp_path / "cache"), **given})
    compiled.keep()
    assert kept in os.environ["JAX_COMPILATION_CACHE_DIR"]
    monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": "/dev/null"})
    compiled.keep()
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_a_user_without_a_home_keeps_nothing_that_is_compiled(monkeypatch):
    """In a container whose user has no entry, every command ended in a traceback."""
    def no_entry(uid):
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", no_entry)
    monkeypatch.setattr(os, "environ", {})
    compiled.keep()
    assert os.environ == {}


def kept(monkeypatch, home, **more):
    """The folder of what is compiled."""
    monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": str(home), **more})
    compiled.keep()
    return pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])


def test_a_program_that_was_half_written_is_kept_anew(tmp_path, monkeypatch):
    """After a full disk or a kill, every later command compiled it again, with a warning."""
    folder = kept(monkeypatch, tmp_path)
    cache = LRUCache(str(folder), max_size=2**30)
    cache.put("whole", b"program")
    with monkeypatch.context() as full, contextlib.suppress(KeyboardInterrupt):
        write = type(cache.path).write_bytes

        def torn(path, content):
            write(path, content[:3])
            raise KeyboardInterrupt

        full.setattr(type(cache.path), "write_bytes", torn)
        cache.put("torn", b"program")
    cache.put("torn", b"program")
    assert (folder / "torn-cache").read_bytes() == b"pro", "jax writes over it now: nothing to do"
    kept(monkeypatch, tmp_path)
    assert cache.get("whole") == b"program" and cache.get("torn") is None
    cache.put("torn", b"program")
    kept(monkeypatch, tmp_path)
    assert cache.get("torn") == b"program"


def test_programs_without_times_stay_where_there_is_no_limit(tmp_path, monkeypatch):
    """Without a limit of size, jax writes no times."""
    limit = {"JAX_COMPILATION_CACHE_MAX_SIZE": "-1"}
    folder = kept(monkeypatch, tmp_path, **limit)
    cache = LRUCache(str(folder), max_size=-1)
    cache.put("whole", b"program")
    kept(monkeypatch, tmp_path, **limit)
    assert cache.get("whole") == b"program"


def test_a_cache_that_cannot_be_changed_is_read(tmp_path, monkeypatch):
    folder = kept(monkeypatch, tmp_path)
    (folder / "torn-cache").write_bytes(b"pro")
    (folder / ".lockfile").mkdir()
    assert kept(monkeypatch, tmp_path) == folder and (folder / "torn-cache").exists()
