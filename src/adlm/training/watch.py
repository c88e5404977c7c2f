"""Who waits for whom: ranks say what they do, those that wait say what for, and a rank that hangs shows its stack.

Every rank notes what it does (`Watch.at`: two assignments), and a thread of it tells the others through the store where
the ranks have met. The first rank's thread reads all of them. Where somebody waits for half a minute it says so once,
and names the ranks that are furthest behind: each of these then prints the stacks of its threads. A rank whose threads
stand still too (stopped, or inside a call that holds Python's lock) is named all the same, and in the second case
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
"""Seconds after which a rank that waits says so, and one that is waited for shows its stack."""
EVERY = 5.0
"""Seconds between two looks."""


def note(message: str) -> None:
    """Say something beside the log lines; to nobody, if the terminal is gone."""
    with contextlib.suppress(OSError):
        print(f"adlm: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Doing:
    """What a rank does."""

    rank: int
    what: str = "starting"
    step: int = -1
    """Optimizer steps taken; -1: training has not begun."""
    waits: bool = False
    """For the other ranks, and not for itself."""
    long: bool = False
    """May take minutes or hours: no reason to show a stack."""
    seconds: float = 0.0
    """For how long."""
    silent: float = 0.0
    """Seconds since its threads were last heard of, as the first rank counts them."""
    where: str = ""
    """Host and process."""

    def __str__(self) -> str:
        quiet = f", not heard of for {self.silent:.0f} s" if self.silent > LATE / 2 else ""
        return f"rank {self.rank} ({self.where}): {self.what}, for {self.seconds:.0f} s{quiet}"


def behind(ranks: Sequence[Doing], late: float = LATE) -> list[Doing]:
    """The ranks that the others wait for: of those that have taken the fewest steps the ones that do not wait
    themselves, or all of them; nobody, where no rank has waited for `late` seconds."""
    if not any(r.waits and r.seconds >= late for r in ranks):
        return []
    last = [r for r in ranks if r.step == min(r.step for r in ranks)]
    return [r for r in last if not r.waits] or last


def describe(ranks: Sequence[Doing], suspects: Sequence[Doing]) -> str:
    """Who waits for what since when, and for whom."""
    waiting = max((r for r in ranks if r.waits), key=lambda r: r.seconds)
    n = sum(r.waits for r in ranks)
    more = f" ({n} of {len(ranks)} ranks wait)" if n > 1 else ""
    return f"{waiting}{more}; furthest behind: " + "; ".join(map(str, suspects[:8]))


class Watch:
    """The watch of one rank; `start` sets it going, leaving it ends it."""

    def __init__(self, rank: int, size: int, store: Any):
        """`store`: of the ranks, a connection of its own: a wait through a shared one would block the watch, too."""
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
        """Note what this rank begins to do; returns what it did before."""
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
                if self.doing.rank < 2:  # the second stands in for a first one that is not heard of
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
        """What every rank does, as far as it has said so."""
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
        """Say who waits for whom, at growing intervals, and ask those for their stacks."""
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
        """Show the stacks of this rank if the first rank has asked for them."""
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
