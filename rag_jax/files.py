"""Every write, rename and removal: an interruption leaves the old content or the new, never a part.

A file is written under a name of its own beside its place. A folder is made inside a working folder

    .NAME.rag_jax-...          beside NAME; nobody else gives such names
      rag_jax-working.json     the mark: without it nothing is removed, renamed or written into
      content/                 becomes NAME when it is whole
      replaced/                was NAME, until content/ has that name; a kill in between leaves it

and all of it is flushed to the disk before it is renamed.
"""

import contextlib
import errno
import filecmp
import hashlib
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from rag_jax.errors import UserError, first_of
from rag_jax.signals import ENDING

MARK = "rag_jax-working.json"
_REPLACED = "replaced"
_ENDS = 1 << 20  # bytes at either end of a file
_OWNED = re.compile(
    r"\.(?P<name>[^/]+)\.rag_jax-(?P<host>[A-Za-z0-9]+)-(?P<pid>\d+)-(?P<random>[0-9a-f]{8})")
_FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk, or what this user may have of it
OF_WRITING = (*_FULL, errno.EFBIG)
_LOST_AFTER_SECS = 24 * 3600  # another host will not finish a file that it has not touched so long
_alive: set[str] = set()  # names of the files and working folders that this process writes now


class FolderError(UserError, OSError):
    """A folder is in the way, or is not one of this package."""


def _host() -> str:
    """Names those processes whose numbers this one sees: of this machine, and of this container,
    which may have the name of its machine."""
    place = [socket.gethostname()]
    with contextlib.suppress(OSError):
        place.append(pathlib.Path("/etc/machine-id").read_text("utf-8", "replace"))
    with contextlib.suppress(OSError):  # Linux alone has it
        place.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\0".join(place).encode("utf-8", "surrogateescape")).hexdigest()[:12]


_HOST = _host()


def can_exist(path: str | os.PathLike[str]) -> bool:
    """Whether a file or folder can have this name: it is not too long, and has no NUL in it."""
    try:
        os.stat(path)
    except ValueError:
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
    """Adds the path to errors that name no file: of a full disk, a quota or a limit of sizes, and
    those of numpy, which only count what was written.

    Raises:
      OSError: an error of the body; such a one names `path`.
    """
    try:
        yield
    except OSError as error:
        short = re.fullmatch(r"\d+ requested and \d+ written", str(error))
        number = errno.ENOSPC if short else error.errno
        if short or number in OF_WRITING and error.filename is None:
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


@contextlib.contextmanager
def replaced(path: pathlib.Path, mode: str = "w", keep: bool = False, aside: bool = False
             ) -> Iterator[IO]:
    """A file to write ("w" = UTF-8, "wb" = bytes), which is flushed to the disk and gets the name
    `path` when the body ends without an error, in place of a file (whose mode it gets) or a link.

    Args:
      keep: where the body ends with an error or a signal, the part that is written is kept as
        unfinished-NAME.
      aside: an earlier file of other content is kept as earlier-NAME.
    """
    temporary = _own_name(path)
    try:
        with (naming(path),
              temporary.open(mode, encoding=None if "b" in mode else "utf-8") as file,
              _ends_as_ctrl_c() if keep else contextlib.nullcontext()):
            yield file
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # no such file yet, or a file system without modes
            temporary.chmod(path.stat().st_mode & 0o777)
        if aside and path.is_file() and not filecmp.cmp(path, temporary, shallow=False):
            print(f"{path}: there was another, which is {set_aside(path, 'earlier')} now")
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        if keep and temporary.exists() and temporary.stat().st_size:
            kept = _free_name(path, "unfinished")
            os.rename(temporary, kept)
            print(f"{path} is not finished: what there is of it is {kept}", file=sys.stderr)
        raise
    finally:
        temporary.unlink(missing_ok=True)
        _alive.discard(temporary.name)


@contextlib.contextmanager
def _ends_as_ctrl_c() -> Iterator[None]:
    """Turns a SIGTERM, or a SIGHUP, that would end the process at once, as no handler is set, into
    an error."""
    alone = threading.current_thread() is threading.main_thread()
    ends = [number for number in ENDING if alone and signal.getsignal(number) is signal.SIG_DFL]
    for number in ends:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_DFL)


def write_text(path: pathlib.Path, text: str, aside: bool = False) -> None:
    """Replaces `path` by `text` as a whole. aside: as of `replaced`."""
    with replaced(path, aside=aside) as file:
        file.write(text)


def write_bytes(path: pathlib.Path, content: bytes) -> None:
    """Replaces `path` by `content` as a whole."""
    with replaced(path, "wb") as file:
        file.write(content)


def write_json(path: pathlib.Path, content: Any, aside: bool = False) -> None:
    """Replaces `path` by `content` as indented JSON. aside: as of `replaced`."""
    write_text(path, json.dumps(content, indent=1) + "\n", aside)


def begin_folder(path: pathlib.Path, key: str | None = None) -> pathlib.Path:
    """An empty folder to fill, which `publish_folder` will move to `path`.

    Args:
      path: what is to be made; its parents are made.
      key: names what it is made from. An earlier call for the same path with the same key gave the
        same folder, whose content is kept. None = a new folder for this process alone.

    Raises:
      FolderError: the working folder's name is taken by a folder without our mark.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if key is None:
        folder = _own_name(path)
    else:
        folder = path.with_name(f".{path.name}.rag_jax-work")
    if os.path.lexists(folder) and (not _is_ours(folder) or _key(folder) != key
                                    or (folder / "content").is_symlink()):
        _remove(folder)
    folder.mkdir(exist_ok=True)
    mark = folder / MARK
    if not mark.exists():
        try:
            with naming(path):
                mark.write_text(json.dumps({"key": key, "host": _HOST, "pid": os.getpid()}),
                                "utf-8")
        except OSError:
            mark.unlink(missing_ok=True)
            folder.rmdir()
            _alive.discard(folder.name)
            raise
    (folder / "content").mkdir(exist_ok=True)
    return folder / "content"


def publish_folder(content: pathlib.Path, path: pathlib.Path, replace: bool = False) -> None:
    """Moves what `begin_folder` gave to its place, and waits until the disk holds all of it.

    Args:
      content: the folder that `begin_folder` gave.
      path: its place.
      replace: an earlier folder at `path` is one of this package, and is removed.

    Raises:
      FolderError: there is something at `path`, and it is no empty folder; the content stays where
        it is.
    """
    sync_tree(content)
    try:
        if replace and os.path.lexists(path):
            os.rename(path, content.with_name(_REPLACED))
        elif path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()
        if os.path.lexists(path):
            raise FolderError(f"{path}: already exists; remove it first, or choose another path")
        os.rename(content, path)
    except BaseException:
        if _holds_former(content.parent, path):
            os.rename(content.with_name(_REPLACED), path)
        raise
    sync_folder(path.parent)
    discard_folder(content)


def as_published(text: str) -> str:
    """A message in which what was written into a working folder, which its end has removed, has the
    name that it would have got."""
    return re.sub(f"(?<=/){_OWNED.pattern}/content", r"\g<name>", text)


def discard_folder(content: pathlib.Path) -> None:
    """Removes the working folder that holds `content`, and all in it."""
    _remove(content.parent)


def remove_folder(path: pathlib.Path) -> None:
    """Removes a folder or file of this package, if it is there: its name is gone at once."""
    if not os.path.lexists(path):
        return
    try:
        content = begin_folder(path)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        # There is no room for a mark: of what a kill leaves here, nobody will know whose it is.
        hidden = _own_name(path)
        os.rename(path, hidden)
        _delete(hidden)
        _alive.discard(hidden.name)
        return
    os.rename(path, content / "removed")
    discard_folder(content)


@contextlib.contextmanager
def new_folder(path: pathlib.Path, replace: bool = False) -> Iterator[pathlib.Path]:
    """A folder to fill, which gets the name `path` when the body ends without an error.

    Arguments and errors as for `publish_folder`.
    """
    content = begin_folder(path)
    try:
        with naming(path):
            yield content
        publish_folder(content, path, replace)
    finally:
        if content.parent.exists() and not _holds_former(content.parent, path):
            discard_folder(content)


def take_over(path: pathlib.Path, target: pathlib.Path) -> None:
    """Gives a file that is never changed a second name, or copies it where links are impossible."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target, follow_symlinks=False)
    except OSError:  # another file system, or one without links
        shutil.copyfile(path, target, follow_symlinks=False)


def move(path: pathlib.Path, target: pathlib.Path) -> None:
    """Renames a complete file; it replaces another one of that name."""
    os.replace(path, target)
    sync_folder(target.parent)


def set_aside(path: pathlib.Path, why: str) -> pathlib.Path:
    """Renames a file or folder that is in the way to WHY-NAME beside it, or WHY-NAME-2, ..."""
    target = _free_name(path, why)
    os.rename(path, target)
    sync_folder(path.parent)
    return target


def remove_leftovers(folder: pathlib.Path, alone: bool = False) -> list[str]:
    """Removes the files and working folders that killed processes have left in this folder (not in
    folders below it).

    Working folders with a key are kept while they have content: the next build goes on with them.

    Args:
      folder: need not exist.
      alone: no other process writes there; otherwise recent files of other hosts are kept.

    Returns:
      The names that were removed.
    """
    removed = []
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        with contextlib.suppress(PermissionError):  # somebody else's, in a folder that all share
            if path.is_symlink() or not _is_leftover(path, alone):
                continue
            if path.is_dir():
                _remove(path)
            else:
                path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def _is_leftover(path: pathlib.Path, alone: bool) -> bool:
    """Whether a path is a temporary file or working folder of ours that nobody will finish."""
    owner = _OWNED.fullmatch(path.name)
    if owner is None:
        return path.name.endswith(".rag_jax-work") and _is_ours(path) and not any(
            path.glob("content"))
    alive = path.name in _alive if alone else _is_alive(path, owner)
    needed = _holds_former(path, path.with_name(owner["name"]))
    return not alive and not needed and (_is_ours(path) or not path.is_dir())


def _holds_former(folder: pathlib.Path, path: pathlib.Path) -> bool:
    """Whether a working folder holds the folder that was at `path`, which nothing has replaced."""
    return os.path.lexists(folder / _REPLACED) and not os.path.lexists(path)


def stamp(path: pathlib.Path, lasting: bool = False) -> str:
    """A digest of the size and times of a file, or of these and the names of all files of a folder,
    which tells whether they have changed; "" where the path does not exist.

    lasting: of another day, when the files may have been copied with their times: of their ends
    instead of their ctime.
    """
    if not can_exist(path) or not path.exists():
        return ""
    digest = hashlib.sha256()
    for file in sorted(each for each in (path, *path.rglob("*")) if each.is_file()):
        status = file.stat()
        more = status.st_ctime_ns
        if lasting:
            more = quick_digest(file) if os.access(file, os.R_OK) else ""
        digest.update(f"{file.relative_to(path)}\0{status.st_size}\0{status.st_mtime_ns}\0{more}\0"
                      .encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def quick_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 (hex) of a file's size and of its first and last MiB, which is fast for 13 GB, too.

    The end of a .bz2 or .gz holds the checksum of everything; of another large file, a change in
    between that keeps its size is not seen.
    """
    size = os.path.getsize(path)
    sha = hashlib.sha256(f"{size} ".encode())
    with open(path, "rb") as file:
        sha.update(file.read(_ENDS))
        file.seek(max(size - _ENDS, 0))
        sha.update(file.read())
    return sha.hexdigest()


def sync_tree(folder: pathlib.Path) -> None:
    """Waits until all files and names under a folder are on the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(pathlib.Path(parent))


def sync_folder(folder: pathlib.Path) -> None:
    """Waits until the names in a folder are on the disk (POSIX; elsewhere it does nothing)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_place(path: pathlib.Path, make_parents: bool = False, source: str | None = None) -> None:
    """Checks before some work that the file of its results can be written.

    Args:
      path: of the file.
      make_parents: its folder will be made, with its parents.
      source: the file that is read, if any.

    Raises:
      FolderError: its folder is missing, is no folder, or may not be written into; or `path` is no
        regular file, or is the source.
    """
    check_parent(path, make_parents)
    if path.is_dir():
        raise FolderError(f"{path}: is a folder; name a file")
    if path.exists() and not path.is_file():  # root would replace /dev/null by a file
        raise FolderError(f"{path}: is no regular file, and would be replaced by one; name another")
    if source is not None and path.exists() and os.path.exists(source) and path.samefile(source):
        raise FolderError(f"{path}: would take the place of {source}, which is read; name another")


def check_parent(path: pathlib.Path, make_parents: bool = True) -> None:
    """Checks before some work that a file or folder can be made where it is to be.

    Arguments and errors as of `check_place`, of its folder alone.
    """
    folder = path.absolute().parent
    while make_parents and not os.path.lexists(folder):
        folder = folder.parent
    if what := in_the_way(folder):
        raise FolderError(f"{path}: {what}; name another")
    if not folder.is_dir():
        raise FolderError(f"{path}: there is no folder {folder}; make it, or name another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FolderError(f"{path}: {folder} may not be written into; name another folder")


def in_the_way(folder: pathlib.Path) -> str:
    """What is in the place of a folder and is none, in words; "" = nothing."""
    if folder.is_dir() or not os.path.lexists(folder):
        return ""
    if folder.exists():
        return f"{folder} is a file, not a folder"
    return f"{folder} is a link to {os.readlink(folder)}, which is not there"


def check_own(folder: pathlib.Path, own: Sequence[str]) -> None:
    """Checks before some work that a folder is new, empty or of this package.

    Args:
      folder: its hidden files do not count, nor do folders of hidden files alone, such as that in
        which a killed process has locked and not yet written anything.
      own: names of files; each folder of this package has one of them.

    Raises:
      FolderError: it has other files only.
    """
    there = sorted(folder.glob("[!.]*"))
    in_use = any(not path.is_dir() or any(path.glob("[!.]*")) for path in there)
    if in_use and not any((folder / name).is_file() for name in own):
        names = first_of([path.name for path in there], 3)
        raise FolderError(f"{folder}: has {names}, and nothing of rag_jax's that may be written "
                          "to; name a new or an empty folder")


def _free_name(path: pathlib.Path, why: str) -> pathlib.Path:
    number, target = 1, path.with_name(f"{why}-{path.name}")
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{why}-{path.name}-{number}")
    return target


def _own_name(path: pathlib.Path) -> pathlib.Path:
    name = os.fsdecode(os.fsencode(path.name)[:100])  # file systems count bytes
    own = path.with_name(
        f".{name}.rag_jax-{_HOST}-{os.getpid()}-{secrets.token_hex(4)}")
    _alive.add(own.name)
    return own


def _is_alive(path: pathlib.Path, owner: re.Match) -> bool:
    """Whether the process that writes `path` may still be there."""
    if owner["host"] == _HOST and os.name == "posix":
        pid = int(owner["pid"])
        if pid == os.getpid():  # in a container, a killed process may have had the same number
            return path.name in _alive
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    return time.time() - _last_change(path) < _LOST_AFTER_SECS


def _last_change(path: pathlib.Path) -> float:
    """When a path was last changed, in seconds; for a folder, the last change of anything in it.

    0 where it is gone: another host may rename or remove it meanwhile.
    """
    times = [0.0]
    with contextlib.suppress(FileNotFoundError):
        times.append(path.lstat().st_mtime)
    for parent, _, names in os.walk(path):
        for name in ("", *names):
            with contextlib.suppress(FileNotFoundError):
                times.append(os.lstat(os.path.join(parent, name)).st_mtime)
    return max(times)


def _is_ours(folder: pathlib.Path) -> bool:
    """Whether a working folder has our mark, or is still empty; never for a link."""
    return not folder.is_symlink() and (
        (folder / MARK).is_file() or folder.is_dir() and not any(folder.iterdir()))


def _key(folder: pathlib.Path) -> str | None:
    try:
        return json.loads((folder / MARK).read_text("utf-8"))["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove(folder: pathlib.Path) -> None:
    """Removes a working folder; the mark last, so that the rest of a killed call can be removed."""
    if not _is_ours(folder):
        raise FolderError(f"{folder}: exists without {MARK}, so it is none of ours; move it")
    for path in folder.iterdir():
        if path.name != MARK:
            _delete(path)
    (folder / MARK).unlink(missing_ok=True)
    folder.rmdir()
    _alive.discard(folder.name)


def _delete(path: pathlib.Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
