"""Files that change whole or not at all, and that are read only if they are files. Imports nothing of this package."""

from __future__ import annotations

import errno
import os
import pathlib
import stat
import tempfile


def read_regular(path: pathlib.Path, most: int = -1) -> bytes:
    """The first ``most`` bytes of ``path`` (-1: all). Raises OSError for a FIFO, which waits for a writer, and for a device,
    which may have no end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    with path.open("rb") as file:
        return file.read(most)


def write_whole(path: pathlib.Path, data: bytes) -> None:
    """Put ``data`` into ``path``, for all to read; whoever reads meanwhile gets the old file or the new one."""
    path = pathlib.Path(os.path.realpath(path))  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except OSError:
        os.unlink(draft)
        raise
