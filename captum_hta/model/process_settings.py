"""Turns of threads to change settings of the process, which a forked child takes back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Undo = Callable[[], object]


class Turn:
    """The turn of one thread at a time to change settings that the whole process shares.

    A child process that is forked while another thread has its turn inherits the changed settings and a lock
    that nobody there will release. So the child takes them back.

    Attributes:
        lock: Held by the thread whose turn it is.
        holder: That thread; ``None`` while it is nobody's turn.
        undos: What takes back the changes, in the order in which they were made.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.holder: int | None = None
        self.undos: list[Undo] = []
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the turn, and have it within the context; a thread may take it again."""
        with self.lock:
            before, self.holder = self.holder, threading.get_ident()
            try:
                yield
            finally:
                self.holder = before

    @contextmanager
    def changed(self, change: Undo, undo: Undo) -> Iterator[None]:
        """Change settings within the context, in a turn.

        Args:
            change: Changes them.
            undo: Takes the change back; also called if ``change`` fails.
        """
        with self.taken():
            self.undos.append(undo)
            try:
                change()
                yield
            finally:
                self.undos.pop()
                undo()

    def _after_fork(self) -> None:
        if self.holder in (None, threading.get_ident()):
            return
        self.lock, self.holder = threading.RLock(), None
        while self.undos:
            self.undos.pop()()
