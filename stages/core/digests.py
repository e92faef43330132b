"""Digests of bytes, files and settings, and the seeds derived from them.

BLAKE3, written as 64 hexadecimal digits. A seed is the head of a digest of what it
belongs to, so it depends on nothing that happened before it.
"""

import json
import os
from pathlib import Path, PosixPath, WindowsPath
from typing import Any

from blake3 import blake3

LARGE = 1 << 26
"""Bytes from which a file is worth several threads."""


def digest_bytes(data: bytes) -> str:
    """Return the digest of a byte string."""
    return blake3(data).hexdigest()


def digest_text(text: str) -> str:
    """Return the digest of a text, which may hold lone surrogates that plain UTF-8 refuses."""
    return digest_bytes(text.encode("utf-8", "surrogatepass"))


def digest_file(path: Path) -> str:
    """Return the digest of a file's bytes, local or behind a URL."""
    if type(path) in (PosixPath, WindowsPath) and path.stat().st_size >= LARGE:
        return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    hasher = blake3()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                hasher.update(block)
    except OSError as error:
        error.filename = error.filename or str(path)  # which a failure to read what was opened does not say
        raise
    return hasher.hexdigest()


def ukey(file: Path) -> str:
    """Return what a store says of a file's contents: it changes when they do."""
    remote: Any = file
    return str(remote.fs.ukey(remote.path))


KNOWN = 4096
"""Digests of local files that are kept."""
_known: dict[tuple[str, str], str] = {}
_local: dict[tuple[int, int, int, int], str] = {}
"""By what a file is, whatever its name: a hard link, or one with a new name, is the same file."""


def know_digest(file: Path, digest: str) -> None:
    """Remember the digest of a file behind a URL that was just written."""
    _known[str(file), ukey(file)] = digest


def cached_digest(file: Path) -> str:
    """Return a file's digest; it is hashed once while its size and time of change stay as they are, or its ukey."""
    if not isinstance(file, os.PathLike):
        key = str(file), ukey(file)
        if key not in _known:
            _known[key] = digest_file(file)
        return _known[key]
    found = file.stat()
    key = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    if key not in _local:
        if len(_local) >= KNOWN:
            _local.clear()
        _local[key] = digest_file(file)
    return _local[key]


def digest_path(path: Path) -> str:
    """Return the digest of a file, or of a folder: of the names and digests of its files, hidden ones left out."""
    if not path.is_dir():
        return cached_digest(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    names = {str(file.relative_to(path)): file for file in files}
    return digest_json({name: cached_digest(file) for name, file in names.items() if not name.startswith(".")})


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_json(value: Any) -> str:
    """Return the digest of a value's canonical JSON."""
    return digest_text(canonical_json(value))


def derive_seed(*parts: Any) -> int:
    """Return a seed in 0..2**63-1 that belongs to these parts alone, such as run seed, step and task."""
    return int(digest_json(list(parts))[:16], 16) >> 1
