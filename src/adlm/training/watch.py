"""Detects hanging ranks: every rank reports what it does or waits for, and a rank that hangs prints its stacks.

Every rank notes what it does (`Watch.at`: two assignments), and one of its threads publishes that in the store through
which the ranks have met. The first rank's thread reads all notes. When a rank has waited for half a minute, it prints
that once, and names the ranks that are furthest behind: each of these then prints the stacks of its threads. A rank
whose threads all hang (it is stopped, or inside a call that holds Python's lock) is named, too, and in the second case
faulthandler prints its stacks without Python's help.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

LATE = 30.0
"""Seconds after which a waiting rank is reported, and a rank that others wait for prints its stacks."""
EVERY = 5.0
"""Seconds between two checks."""


def note(message: str) -> None:
    """Print a message beside the log lines; ignored if the terminal is gone."""
    with contextlib.suppress(OSError):
        print(f"adlm: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Doing:
    """What a rank is doing."""

    rank: int
    what: str = "starting"
    step: int = -1
    """Optimizer steps taken; -1: training has not begun."""
    waits: bool = False
    """It waits for other ranks."""
    long: bool = False
    """It may take minutes or hours: no reason to print a stack."""
    seconds: float = 0.0
    """How long it has been doing this."""
    silent: float = 0.0
    """Seconds since its watching thread last reported, as the reading rank counts them."""
    where: str = ""
    """Host and process id."""

    def __str__(self) -> str:
        quiet = f", not heard of for {self.silent:.0f} s" if self.silent > LATE / 2 else ""
        return f"rank {self.rank} ({self.where}): {self.what}, for {self.seconds:.0f} s{quiet}"


def behind(ranks: Sequence[Doing], late: float = LATE) -> list[Doing]:
    """The ranks that the others wait for: among those with the fewest steps, the ones that do not wait themselves, or
    all if all wait. Empty if no rank has waited for `late` seconds."""
    if not any(r.waits and r.seconds >= late for r in ranks):
        return []
    last = [r for r in ranks if r.step == min(r.step for r in ranks)]
    return [r for r in last if not r.waits] or last


def describe(ranks: Sequence[Doing], suspects: Sequence[Doing]) -> str:
    """Say which rank waits, for what, since when, and for which ranks."""
    waiting = max((r for r in ranks if r.waits), key=lambda r: r.seconds)
    n = sum(r.waits for r in ranks)
    more = f" ({n} of {len(ranks)} ranks wait)" if n > 1 else ""
    return f"{waiting}{more}; furthest behind: " + "; ".join(map(str, suspects[:8]))


class Watch:
    """The watching thread of one rank, between `start` and `stop`."""

    def __init__(self, rank: int, size: int, store: Any):
        """`store`: a separate connection to the ranks' store; a wait on a shared one would block this thread, too."""
        self.size, self.store = size, store
        self.doing = Doing(rank, where=f"{socket.gethostname()}, process {os.getpid()}")
        self.since = time.monotonic()
        self.beats = 0
        self.heard: dict[int, tuple[int, float]] = {}
        """Rank -> its last beat and when it was seen."""
        self.patience, self.shown = LATE, 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run, name="watch", daemon=True)

    def start(self) -> "Watch":
        self.thread.start()
        return self

    def stop(self) -> None:
        self.over.set()
        self.thread.join(2 * EVERY)
        faulthandler.cancel_dump_traceback_later()

    def at(self, what: str, step: int | None = None, waits: bool = False, long: bool = False) -> Doing:
        """Note what this rank starts to do; returns what it did before."""
        before, self.since = self.doing, time.monotonic()
        step = before.step if step is None else step
        self.doing = replace(before, what=what, step=step, waits=waits, long=long)
        return before

    def run(self) -> None:
        with contextlib.suppress(Exception):  # the store is gone: so is the run
            while not self.over.wait(EVERY):
                # printed by a thread that needs no Python, unless this one comes back in time
                faulthandler.dump_traceback_later(LATE + EVERY)
                self.tell()
                if self.doing.rank < 2:  # the second rank takes over if the first is silent
                    ranks = self.read()
                    first = next((r for r in ranks if r.rank == 0), None)
                    if self.doing.rank == 0 or (first is not None and first.silent > LATE / 2):
                        self.judge(ranks)
                self.obey()

    def tell(self) -> None:
        self.beats += 1
        told = asdict(replace(self.doing, seconds=time.monotonic() - self.since)) | {"beat": self.beats}
        self.store.set(f"adlm/watch/{self.doing.rank}", json.dumps(told))

    def read(self) -> list[Doing]:
        """What every rank is doing, for ranks that have reported."""
        keys = [key for rank in range(self.size) if self.store.check([key := f"adlm/watch/{rank}"])]
        now, found = time.monotonic(), []
        for text in self.store.multi_get(keys):
            told = json.loads(text)
            beat = told.pop("beat")
            if self.heard.get(told["rank"], (0, 0.0))[0] != beat:
                self.heard[told["rank"]] = (beat, now)
            silent = now - self.heard[told["rank"]][1]
            found.append(replace(Doing(**told), seconds=told["seconds"] + silent, silent=silent))
        return found

    def judge(self, ranks: Sequence[Doing]) -> None:
        """Report which ranks the others wait for, at growing intervals, and ask those for their stacks."""
        suspects = behind(ranks, self.patience)
        if not suspects:
            if not any(r.waits and r.seconds >= LATE for r in ranks):
                self.patience = LATE
            return
        note(f"waiting: {describe(ranks, suspects)}")
        self.patience *= 2
        hung = [r.rank for r in suspects if not r.long]
        for r in suspects:
            if r.silent > LATE / 2 and not r.long:
                note(
                    f"{r} does not answer: it is stopped, gone, or inside a call that holds Python's lock;"
                    " `py-spy dump --native --pid` on its host shows where"
                )
        self.store.set("adlm/watch/stacks", json.dumps({"number": self.shown + 1, "ranks": hung}))

    def obey(self) -> None:
        """Print the stacks of this rank if they have been asked for."""
        if not self.store.check(["adlm/watch/stacks"]):
            return
        asked = json.loads(self.store.get("adlm/watch/stacks"))
        if asked["number"] <= self.shown:
            return
        self.shown = asked["number"]
        if self.doing.rank in asked["ranks"]:
            note(f"{replace(self.doing, seconds=time.monotonic() - self.since)}; the others wait for it. Its stacks:")
            with contextlib.suppress(OSError, ValueError):
                faulthandler.dump_traceback(all_threads=True)
