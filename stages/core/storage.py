"""Paths, local or behind a URL, and files that appear whole or not at all.

A local file is written under a temporary name, synced and renamed. Object stores
show an object only when its upload has ended, so there it is written as it is.
"""

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from nanoskyrl.stages.core.claims import claimed
from nanoskyrl.stages.core.digests import digest_bytes, digest_file, know_digest, ukey
from nanoskyrl.stages.core.errors import InputError, OutputError, SettingsError, told_as

S3_TRIES = 20
"""s3fs waits longer from try to try, up to 15 seconds; with botocore's own tries it is two minutes and more."""
TEMPORARY = ".tmp"
"""Suffix of files that are being written; readers never look at them."""


def expanded(text: str) -> str:
    """Return a path with the home folder in place of a leading `~` and of `$HOME`."""
    return os.path.expanduser(re.sub(r"\$HOME\b|\$\{HOME\}", lambda _: os.path.expanduser("~"), text))


def as_path(place: str | os.PathLike[str]) -> Path:
    """Return a path for a local name or an fsspec URL such as `s3://bucket/run`."""
    text = str(place)
    text = text.removeprefix("file://").removeprefix("local://")
    if "://" not in text:
        return place if isinstance(place, Path) else Path(expanded(text))
    from upath import UPath

    with told_as(
        SettingsError,
        f"cannot open `{text}`",
        ValueError,
        ImportError,
        hint="Name a local path or an installed fsspec URL",
    ):
        # What other processes write is to be seen, so listings are not remembered.
        path = UPath(text, use_listings_cache=False)
        return patient(cast(Path, path))  # its store is made now, so that a missing package is reported now


def patient(path: Path) -> Path:
    """Have the store of a path asked again while nobody answers, for about two minutes: it may be starting again.

    It holds for all paths of the store in this process; one that came from another process needs it, too.
    """
    store = cast(Any, path).fs
    if "s3" in store.protocol:
        from botocore.exceptions import ConnectionError as NoConnection
        from s3fs.core import add_retryable_error

        add_retryable_error(NoConnection)
        store.retries = S3_TRIES
    return path


def entries(directory: Path) -> list[Path]:
    """Return what is in a directory; stores know none that is empty."""
    return list(directory.iterdir()) if is_local(directory) or directory.exists() else []


def upload_tree(source: Path, target: Path) -> None:
    """Put every file of a local directory in its place behind a URL."""
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        place = cast(Any, target / file.relative_to(source).as_posix())
        with write_errors(place):
            place.fs.put_file(str(file), place.path)
        know_digest(place, digest_file(file))


@contextlib.contextmanager
def written_here(directory: Path) -> Iterator[Path]:
    """Give a place on this machine for what libraries write; behind a URL, it is put in its own place at the end."""
    if is_local(directory):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="nanoskyrl-") as scratch:
        yield Path(scratch)
        upload_tree(Path(scratch), directory)


def mirror_of(path: Path) -> Path:
    """Return where copies of what lies behind a URL are kept on this machine; a local path is itself."""
    if is_local(path):
        return path
    remote = cast(Any, path)
    home = os.environ.get("NANOSKYRL_CACHE") or os.path.join(tempfile.gettempdir(), f"nanoskyrl-{os.getuid()}-mirror")
    return Path(home) / remote.protocol / remote.path.strip("/")


def at_hand(directory: Path, without: Callable[[Path], bool] = lambda file: False) -> Path:
    """Return a directory on this machine: itself, or a copy of what lies behind its URL, which is kept.

    Args:
        directory: The place.
        without: Files that need not be in a copy.
    """
    if is_local(directory):
        return directory
    copy = mirror_of(directory)
    there = {file.relative_to(directory).as_posix(): file for file in directory.rglob("*") if file.is_file()}
    for name, file in there.items():
        place, mark = copy / name, copy.parent / f".{copy.name}" / f"{name}.ukey"
        key = ukey(file)
        if not without(file) and not (place.is_file() and mark.is_file() and mark.read_text() == key):
            make_directory(mark.parent)
            make_directory(place.parent)
            # Not in the copy, which another process may be clearing of what is not in the original.
            scratch = mark.with_name(f"{mark.name}.{secrets.token_hex(4)}{TEMPORARY}")
            with write_errors(place):
                with scratch.open("wb") as opened, file.open("rb") as source:
                    shutil.copyfileobj(source, opened, 1 << 24)
                scratch.replace(place)
            mark.write_text(key)
    for place in copy.rglob("*") if copy.is_dir() else ():
        if place.is_file() and place.relative_to(copy).as_posix() not in there:
            place.unlink()
    return copy


def read_named(name: str, what: str, hint: str) -> str:
    """Return the text of a UTF-8 file that the user named; a mark of its encoding is left out.

    Args:
        name: A local path or an address.
        what: What it is, for the message.
        hint: What to name instead.

    Raises:
        InputError: it is not there.
    """
    path = as_path(name)
    if not path.is_file():
        raise InputError(f"there is no {what} `{name}`", hint=hint)
    return path.read_text(encoding="utf-8-sig")


def file_bytes(path: Path) -> bytes:
    """Return what is in a file that a stage wrote; a device or pipe in its place might never end.

    Raises:
        OSError: it cannot be read, or is no file.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "It is no file", str(path))
    return path.read_bytes()


def is_local(path: Path) -> bool:
    """Say whether a path lies in this machine's file system."""
    return isinstance(path, os.PathLike)


@contextlib.contextmanager
def write_errors(path: Path, *others: type[Exception]) -> Iterator[None]:
    """Turn a failure to write into one error that names the place.

    Args:
        path: What is being written.
        others: What a library raises besides OSError, whose text is then all there is.
    """
    try:
        yield
    except (OSError, *others) as error:
        says = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
        raise OutputError(f"cannot write `{path}`: {says}", hint="Check free space and permissions") from error


@contextlib.contextmanager
def whole_file(path: Path, *, durable: bool = True) -> Iterator[IO[Any]]:
    """Open a file for binary writing that is at `path` only once it is complete, and on disk if `durable`."""
    with write_errors(path):
        if not is_local(path):
            # Closing a remote file uploads what is in it, also half of it: so it is opened when all is there.
            buffer = io.BytesIO()
            yield buffer
            path.write_bytes(buffer.getvalue())
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + TEMPORARY)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
        except OSError:  # a full disk gets its room back
            temporary.unlink(missing_ok=True)
            raise
        try:
            temporary.replace(path)
        except FileNotFoundError as error:  # what was just written is gone: somebody else put it in place
            raise OutputError(
                f"another process is writing `{path}`", hint="Wait for it, or name another place"
            ) from error


def sync_directory(path: Path) -> None:
    """Make renames inside a local directory survive a power cut."""
    if not is_local(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Bring every file of a local directory to the disk; one with another name is there already."""
    for file in path.iterdir():
        if file.is_dir():
            sync_tree(file)
        elif file.stat().st_nlink == 1:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    sync_directory(path)


def write_whole(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Put these bytes in place at once."""
    with whole_file(path, durable=durable) as file:
        file.write(data)


def create_whole(path: Path, data: bytes) -> bool:
    """Put these bytes in place at once, unless something is there; return whether they were put.

    Of several who write one place, the first one wins: by a hard link, or by a conditional put behind a URL.
    """
    with write_errors(path):
        if not is_local(path):
            try:
                place = cast(Any, path)
                place.fs.pipe_file(place.path, data, mode="create")
            except FileExistsError:
                return False
            return True
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            _link_or_rename(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(path.parent)
        return True


def _link_or_rename(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links here: the last one wins
        temporary.replace(path)


def make_directory(path: Path) -> None:
    """Create a directory and its parents, or say why it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot create `{path}`: {error.strerror or error}", hint="Name a directory you may write to"
        ) from error


def as_usual(file: Path) -> None:
    """Give a file the permissions that files made here get; what saves safetensors makes them for its user alone."""
    probe = file.with_name(file.name + TEMPORARY)
    probe.touch()
    usual = probe.stat().st_mode
    probe.unlink()
    if file.stat().st_mode != usual:
        file.chmod(usual)


def remove_tree(path: Path) -> None:
    """Delete a directory, local or not, if it is there."""
    if not path.exists():
        return
    if is_local(path):
        shutil.rmtree(path)
    else:
        cast(Any, path).rmdir(recursive=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where there are no hard links; inside a store, by the store."""
    ours, theirs = cast(Any, source), cast(Any, target)
    if is_local(source) and is_local(target):
        try:
            os.link(source, target)
        except OSError:
            # Not into the target: if it is there, it may be another policy's file, too.
            temporary = target.with_name(target.name + TEMPORARY)
            shutil.copyfile(source, temporary)
            temporary.replace(target)
    elif not is_local(source) and not is_local(target) and ours.fs is theirs.fs:
        ours.fs.cp_file(ours.path, theirs.path)
    else:
        target.write_bytes(source.read_bytes())


@contextlib.contextmanager
def locked(directory: Path, held: OutputError | None = None) -> Iterator[None]:
    """Keep other processes from writing here; a killed one lets go by itself.

    Args:
        directory: Or a file, for which one process at a time may answer.
        held: What is raised while another process does; None: that it writes the directory.
    """
    held = held or OutputError(f"another process is writing `{directory}`", hint="Wait for it, or name another output")
    if not is_local(directory):
        with claimed(directory, held):
            yield
        return
    place = lock_of(directory)
    try:
        lock = _take(place)
    except BlockingIOError as error:
        raise held from error
    try:
        yield
    finally:
        # While it is held: whoever opened it meanwhile finds another one, or none, in its place, and looks again.
        place.unlink(missing_ok=True)
        os.close(lock)


def lock_of(directory: Path) -> Path:
    """Return the file that stands for a directory's lock; kept out of it, for its files are all accounted for."""
    name = f"nanoskyrl-{os.getuid()}-{digest_bytes(str(directory.resolve()).encode())[:16]}.lock"
    return Path(tempfile.gettempdir()) / name


def _take(place: Path) -> int:
    """Return the handle of a lock file that is ours now, or raise BlockingIOError."""
    while True:
        with write_errors(place):
            lock = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(lock).st_ino == place.stat().st_ino:
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # of one who let go while we opened it
