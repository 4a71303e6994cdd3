"""A progress bar on stderr: tqdm's where it is installed (transformers brings it), else a line a part. Silent off a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, int, int], bool]
"""What is done now, how many parts are done, and of how many. False if nobody has been shown it."""


@contextmanager
def progress_bar(title: str, *, show: bool = True, timed: bool = False) -> Iterator[Report]:
    """Call what it gives with (part, number done, number of parts). `timed`: with the time taken and left."""
    if not show or not sys.stderr.isatty():
        yield lambda *_: False
        return
    try:
        from tqdm import tqdm
    except ImportError:

        def report(part: str, done: int, parts: int) -> bool:
            print(f"{title}: {done}/{parts} {part}", file=sys.stderr, flush=True)
            return True

        yield report
        return
    clock = " [{elapsed}<{remaining}]" * timed
    with tqdm(desc=title, bar_format="{desc}: {bar:20} {n_fmt}/{total_fmt}" + clock + " {postfix}", file=sys.stderr) as bar:

        def report(part: str, done: int, parts: int) -> bool:
            if timed and bar.total is None:
                bar.initial = done - 1  # of a resumed run: the time left is reckoned from what this one has done
            bar.total, bar.n = parts, done
            bar.set_postfix_str(part)
            return True

        yield report
