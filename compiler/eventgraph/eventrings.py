"""Buffers that the chunks of all transfers of a kind take in turn: casts' pinned memory, and the sums of gradients on the GPU.

A chunk is written when what was in its buffer before has left. Of chunks of one transfer that is a stall of the transfer by the
next. Between transfers it depends on how many chunks there were before: known where nothing is to choose, and else that the
last of them fill all buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slidedp.compiler.eventgraph.eventgraph import Linear

if TYPE_CHECKING:
    from slidedp.compiler.eventgraph.eventparts import Parts, Point, Transfer


@dataclass
class Ring:
    """`slots` buffers, in the order in which transfers fill them. `what`: for the names of constraints."""

    parts: Parts
    slots: int
    what: str
    left: list[tuple[Point, ...]] = field(default_factory=list)  # of each chunk so far: moments before which it has not left
    known: bool = True
    free: Point | None = None  # where it is not known: when the first buffer of the last transfer's chunks is

    def fill(self, tag: str, fill: Transfer, empty: Transfer, filling: tuple[int, int], emptying: tuple[Point, Point]) -> None:
        """By `fill`, whose events of start and end are `filling`; emptied by `empty` between the moments `emptying`."""
        start, end = filling
        began, ended = emptying
        self.parts.wait(end, began + fill.stalled_by(empty, self.slots), f"{self.what} of {tag}")
        if len(fill.each) > 1 or not self.known:
            self.known = False
            if self.free:
                self.parts.wait(start, self.free + fill.only(), f"{self.what} before {tag}")
            elif self.left:
                for point in self.left[-1]:
                    self.parts.wait(start, point + fill.only(), f"{self.what} before {tag}")
            self.free = began + fill.freed_by(empty, self.slots)
        elif fill.ever:
            self.take_turns(tag, fill, start, end)
            num, us = fill.each[0].num, empty.each[0].chunk_us
            if num > self.slots:  # the first may be late to leave, and all that waits for it then takes its time
                self.parts.wait(end, began + (us + (num - self.slots) * fill.each[0].chunk_us), f"{self.what} of {tag}")
            self.left += [(began + Linear((c + 1) * us), ended + Linear((c + 1 - num) * us)) for c in range(num)]

    def take_turns(self, tag: str, fill: Transfer, start: int, end: int) -> None:
        """Chunk c takes the buffer of the one `slots` before it, and has the rest of the transfer behind it."""
        num, us = fill.each[0].num, fill.each[0].chunk_us
        for c in range(min(num, self.slots)):
            if len(self.left) >= self.slots - c:
                for point in self.left[len(self.left) - self.slots + c]:
                    self.parts.wait(end, point + (num - c) * us, f"{self.what} before {tag}")
                    if not c:
                        self.parts.wait(start, point, f"{self.what} before {tag}")
