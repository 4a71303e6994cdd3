"""A progress bar on stderr: tqdm's where it is installed (transformers brings it), else a line a part. Silent off a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, int, int], object]
"""What is done now, how many parts are done, and of how many."""


@contextmanager
def progress_bar(title: str, *, show: bool = True) -> Iterator[Report]:
    """Call what it gives with (part, number done, number of parts)."""
    if not show or not sys.stderr.isatty():
        yield lambda *_: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda part, done, parts: print(f"{title}: {done}/{parts} {part}", file=sys.stderr, flush=True)
        return
    with tqdm(desc=title, bar_format="{desc}: {bar:20} {n_fmt}/{total_fmt} {postfix}", file=sys.stderr) as bar:

        def report(part: str, done: int, parts: int) -> None:
            bar.total, bar.n = parts, done
            bar.set_postfix_str(part)

        yield report
