"""Files that change whole or not at all. Imports nothing of this package."""

from __future__ import annotations

import os
import pathlib
import tempfile


def write_whole(path: pathlib.Path, data: bytes) -> None:
    """Put ``data`` into ``path``, for all to read; whoever reads meanwhile gets the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.resolve()  # a link stays one
    handle, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except OSError:
        os.unlink(draft)
        raise
