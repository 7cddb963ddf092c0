"""Files that are written as a whole, and checksums of the arrays in them."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

StoredArray = NDArray[Any]
"""An array of any dtype, as it is read from a file."""


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file such that it is there as a whole, or not at all.

    Args:
        path: The file.
        write: Called with the path of a temporary file beside it, which then takes its place.

    Raises:
        OSError: If the file cannot be written; names it and what to do.
    """
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        write(part)
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OSError(f"{path} cannot be written ({reason}): make room, or name another folder") from error
    finally:
        part.unlink(missing_ok=True)


def checksum(arrays: Mapping[str, StoredArray]) -> str:
    """A digest of the names, types, shapes and values of arrays."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
