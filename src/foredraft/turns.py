"""One thread at a time: which generation uses which models, caches and drafters.

Passes over one cache cannot run beside each other, and what a pass puts on a model (hooks, overrides) is in the way of every other. So a
generation takes its turn for each step and keeps it between steps for as long as it has rows under way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from weakref import WeakSet

from foredraft.errors import BusyError

POLL = 0.05  # seconds: a turn can also become free because a thread ended or a stream was collected

_changed = threading.Condition()
_turns: WeakSet[Turn] = WeakSet()


class Turn:
    """The use of some objects. A turn is *under way* in one thread, or *rests* between steps, or is free.

    A turn that rests is taken over by its own thread, and by any other once its thread has ended.

    Args:
        own: what nobody else may use before this turn is over, nor this thread: a target, a drafter.
        models: what other turns of the same thread may use as well.
        wait: :meth:`take` waits while another thread has its turn, instead of raising.
    """

    def __init__(self, own: Iterable[object], models: Iterable[object] = (), *, wait: bool = False):
        own, models = tuple(own), tuple(models)
        self._held = own, models  # so that the numbers below remain theirs
        self._own = frozenset(map(id, own))
        self._all = self._own.union(map(id, models))
        self.wait = wait
        self.thread: threading.Thread | None = None  # that took it; None if it is free
        self.running = False
        with _changed:
            _turns.add(self)

    def take(self) -> None:
        """Begin a step.

        Raises:
            BusyError: another thread has its turn, or this call comes from inside another one.
        """
        me = threading.current_thread()
        with _changed:
            if self.thread is me and not self.running:  # it rests, so nobody else can have any of it
                self.running = True
                return
            while (other := self._in_the_way(me)) is not None:
                if other.thread is me:
                    raise BusyError(
                        "this Speculator was called from inside a call of its own, for instance by a logits processor or a stopping "
                        "criterion; give the inner call a Speculator of its own"
                    )
                if not self.wait:
                    raise BusyError(
                        f"{getattr(other.thread, 'name', 'another thread')} is using this Speculator or a model of it, and one call runs "
                        "at a time. Pass Speculator(..., wait=True) to wait until it is done, or give each thread a Speculator with a "
                        "model object of its own. Close a stream that you do not read to its end"
                    )
                _changed.wait(POLL)
            for each in _turns:
                if each is not self and not each._own.isdisjoint(self._own):
                    each.thread = None
            self.thread, self.running = me, True

    def resume(self) -> None:
        """Begin a step that uses none of the models, so that it is in nobody's way unless this turn rests.

        Raises:
            BusyError: it is under way.
        """
        with _changed:
            while self.running:
                if not self.wait or self.thread is threading.current_thread():
                    raise BusyError(f"this generation is under way in {getattr(self.thread, 'name', 'another thread')}; close it there")
                _changed.wait(POLL)
            if self.thread is not None:
                self.thread = threading.current_thread()
            self.running = True

    def rest(self, *, keep: bool = False) -> None:
        """End a step; ``keep`` the turn until the next one."""
        with _changed:
            self.running = False
            if not keep:
                self.thread = None
            _changed.notify_all()

    def __enter__(self) -> Turn:
        self.take()
        return self

    def __exit__(self, *error: object) -> None:
        self.rest()

    def _in_the_way(self, me: threading.Thread) -> Turn | None:
        if self.running:
            return self
        for each in _turns:
            if each is self or each.thread is None or each._all.isdisjoint(self._all):
                continue
            nested = each.running and not each._own.isdisjoint(self._own)
            if nested if each.thread is me else each.running or each.thread.is_alive():
                return each
        return None
