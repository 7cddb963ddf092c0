"""The state of the process that loading a model leaves as it was."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import transformers


@contextmanager
def unchanged_state() -> Iterator[None]:
    """Restore, on any exit, what importing and loading a model changes in the process.

    These are the filters of warnings, the log level of ``transformers`` (importing a bridge of
    TransformerLens sets it), and the random states of Python, NumPy and PyTorch on the CPU (making a model
    draws its weights).
    """
    verbosity = transformers.logging.get_verbosity()
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)
