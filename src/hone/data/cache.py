"""Cache of what was made from data, by content: memory-mapped Arrow files in the user's cache folder.

An entry is an Arrow file, and a JSON file that names it with its size, time, checksum and notes. The JSON file is
written last and replaced whole, so that an entry is there completely or not at all. An Arrow file whose time is another
one than noted is compared with the checksum. The JSON file's own time is that of the last use; entries unused for a
month are removed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hone.data.report import LoadProgress, on_stderr
from hone.errors import DataError
from hone.runtime.files import sync, write_whole

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")
Write = Callable[[Any], Mapping[str, Any]]
"""Writes an Arrow file to a sink that `pyarrow.ipc.new_file` takes; returns notes to keep beside it, as JSON."""

UNUSED_DAYS = 30
_CHUNK_BYTES = 1 << 22


class CacheEntry(NamedTuple):
    """What was written for a key."""

    batches: pyarrow.RecordBatchFileReader
    """Memory-mapped, or held in memory."""
    notes: Mapping[str, Any]


def cache_folder() -> Path:
    """`hone/data` in XDG_CACHE_HOME, or in ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hone" / "data"


def key_of(*parts: Any) -> str:
    """A key: equal for equal parts, which JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class DataCache:
    """Finds and keeps what was made from data.

    Attributes:
        say: shows a line to the user: progress, and what is wrong with the cache.
        small_bytes: a source of fewer bytes is read at every start, and nothing of it is cached.
    """

    def __init__(
        self,
        say: Callable[[str], None] = on_stderr,
        *,
        small_bytes: int = 1 << 20,
        noted_bytes: int = 1 << 20,
        settled_s: float = 2.0,
    ) -> None:
        """
        Args:
            noted_bytes: the digests of files from this size on are kept in the cache folder.
            settled_s: seconds since its last change after which a file's times tell its next change: clocks of file
                systems are coarse.
        """
        self.say, self.small_bytes = say, small_bytes
        self._noted_bytes, self._settled_s = noted_bytes, settled_s
        self._digests: dict[str, str] = {}

    def digest(self, path: Path) -> str:
        """SHA-256 of a file's bytes. Read once, unless its size, times or inode change; of a large file, once for all
        processes. Raises OSError."""
        found = path.stat()
        changed_s = max(found.st_mtime, found.st_ctime)
        key = key_of(
            str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_dev, found.st_ino
        )
        if key not in self._digests:
            is_noted = found.st_size >= self._noted_bytes and time.time() - changed_s > self._settled_s
            note = cache_folder() / f"{key}.digest"
            digest = ""
            if is_noted:
                with suppress(OSError, ValueError):
                    os.utime(note)
                    digest = note.read_text("ascii")
            if not re.fullmatch("[0-9a-f]{64}", digest):
                hashed = hashlib.sha256()
                for chunk in _chunks(path, "hashing", self.say):
                    hashed.update(chunk)
                digest = hashed.hexdigest()
                if is_noted:
                    with suppress(OSError):  # a cache that cannot be written to, which `save` says
                        note.parent.mkdir(parents=True, exist_ok=True)
                        write_whole(note, digest)
            self._digests[key] = digest
        return self._digests[key]

    def find(self, key: str) -> CacheEntry | None:
        """The entry of a key. One that is broken is removed, which is said, and is none."""
        import pyarrow

        described = cache_folder() / f"{key}.json"
        try:
            description = described.read_bytes()
        except OSError:  # none, or a folder that cannot be used, which `save` says
            return None
        try:
            about = json.loads(description)
            path = described.with_name(about["file"])
            found = path.stat()
            is_untouched = found.st_mtime_ns == about["mtime_ns"]
            if found.st_size != about["bytes"] or not (is_untouched or _checksum(path, self.say) == about["crc32"]):
                raise ValueError("its size or checksum differs")
            entry = CacheEntry(_mapped(path), about["notes"])
        except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
            self.say(f"warning: the data cache entry {described} is broken ({error}); it is rebuilt")
            for path in described.parent.glob(f"{key}.*"):
                with suppress(OSError):
                    path.unlink()
            return None
        with suppress(OSError):  # of another user, or on a disk that cannot be written to
            os.utime(described)
        return entry

    def save(self, key: str, write: Write) -> CacheEntry:
        """Write an entry and keep it. Where the cache folder cannot be written to, which is said, it lasts as long as
        this process.

        Raises DataError where no temporary file can be written either.
        """
        folder = cache_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_unused(folder)
            path, notes = _written(folder, f"{key}.", write)
            sync(path)
            written = path.stat()
            about = {"file": path.name, "bytes": written.st_size, "mtime_ns": written.st_mtime_ns, "notes": notes}
            about["crc32"] = _checksum(path, self.say)
            aside, _ = _written(folder, f"{key}.", lambda sink: sink.write(json.dumps(about).encode()), suffix=".new")
            sync(aside)
            aside.replace(folder / f"{key}.json")
            sync(folder)
            return CacheEntry(_mapped(path), notes)
        except OSError as error:
            why = f"cannot be written ({error}), so the next start reads the data again"
            self.say(f"warning: the data cache in {folder} {why}")
        try:
            path, notes = _written(Path(tempfile.gettempdir()), "hone-data.", write)
            entry = CacheEntry(_mapped(path), notes)
            path.unlink()  # the mapping stays
            return entry
        except OSError as error:
            raise DataError(
                f"data: no room for a memory-mapped copy of the rows: {error}. Set XDG_CACHE_HOME."
            ) from error


DEFAULT_CACHE = DataCache()
"""Of callers without a console of their own."""


def in_memory(write: Write) -> CacheEntry:
    """An entry that is not kept, and in no file."""
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    notes = write(sink)
    return CacheEntry(pyarrow.ipc.open_file(sink.getvalue()), notes)


def _written(folder: Path, prefix: str, write: Callable[[Any], T], *, suffix: str = ".arrow") -> tuple[Path, T]:
    """A new file, of which a failure leaves nothing, and what `write` returns. Its name is no other's, as another
    process may write the same entry."""
    handle, name = tempfile.mkstemp(prefix=prefix, suffix=suffix, dir=folder)
    try:
        with os.fdopen(handle, "wb") as sink:
            returned = write(sink)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name), returned


def _mapped(path: Path) -> pyarrow.RecordBatchFileReader:
    import pyarrow

    return pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))


def _checksum(path: Path, say: Callable[[str], None]) -> int:
    crc = 0
    for chunk in _chunks(path, "checking", say):
        crc = zlib.crc32(chunk, crc)
    return crc


def _chunks(path: Path, doing: str, say: Callable[[str], None]) -> Iterator[bytes]:
    """The bytes of a file. Raises OSError."""
    progress = LoadProgress(f"{doing} {path}", say, total=path.stat().st_size >> 20, unit="MiB")
    with path.open("rb") as file:
        for number in itertools.count():
            if not (chunk := file.read(_CHUNK_BYTES)):
                return
            yield chunk
            progress.at((number + 1) * _CHUNK_BYTES >> 20)


def _remove_unused(folder: Path) -> None:
    oldest = time.time() - UNUSED_DAYS * 24 * 3600
    for path in folder.iterdir():
        described = folder / f"{path.name.partition('.')[0]}.json"
        with suppress(OSError):  # another process removes it too
            used = max(one.stat().st_mtime for one in (path, described) if one.exists())
            if used < oldest:
                path.unlink()
