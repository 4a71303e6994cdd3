"""Draws what throughput.py printed: tokens a second over the batch, or over the HBM budget, as a PNG.

    python examples/benchmarks/throughput.py --batch 8,16,64 --measure solver=rule state=host / solver=cp-sat | tee log
    python examples/benchmarks/plots.py roofline log -o roofline.png
    python examples/benchmarks/plots.py budgets log -o budgets.png

``roofline``: compute-only, each case, and the bound of the first case. ``budgets``: one line a batch, of cases that give
`hbm_budget` (bounded_memory.py), the median of several runs. Lines of the log that are not JSON are passed over. Needs
matplotlib, which SlideDP itself does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from slidedp.compiler.units import parse_bytes

Line = dict[str, Any]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["roofline", "budgets"])
    p.add_argument("log", nargs="+", type=Path)
    p.add_argument("-o", "--output", type=Path, required=True)
    args = p.parse_args()
    lines = [line for path in args.log for line in read(path)]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    {"roofline": roofline, "budgets": budgets}[args.what](axes, lines)
    axes.set_ylabel("tokens / s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(args.output, dpi=150)


def read(path: Path) -> Iterable[Line]:
    """The results in a log, in its order; failed cases left out."""
    for text in path.read_text().splitlines():
        if text.startswith("{") and "tokens_per_s" in (line := json.loads(text)):
            yield line


def roofline(axes: Any, lines: list[Line]) -> None:
    points: dict[str, dict[int, float]] = defaultdict(dict)
    for line in lines:
        points[name_of(line)][line["batch"]] = line["tokens_per_s"]
        if "bound_over_step" in line:
            points["bound, " + name_of(line)][line["batch"]] = line["tokens_per_s"] / line["bound_over_step"]
    kept = [name for name in points if name.startswith("bound")][:1]
    for name, of_batch in points.items():
        if not name.startswith("bound") or name in kept:
            style = "k--" if name in kept else "o-"
            axes.plot(*zip(*sorted(of_batch.items()), strict=True), style, label=name)
    batches = sorted({batch for of_batch in points.values() for batch in of_batch})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, map(str, batches))
    axes.set_xlabel(f"sequences of {lines[0]['seq']} tokens in a batch")
    axes.set_title(lines[0]["model"])


def budgets(axes: Any, lines: list[Line]) -> None:
    points: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if budget := line.get("case", {}).get("hbm_budget"):
            points[line["batch"]][parse_bytes(str(budget)) / 2**30].append(line["tokens_per_s"])
    for batch, of_budget in sorted(points.items()):
        medians = [(budget, statistics.median(runs)) for budget, runs in sorted(of_budget.items())]
        axes.plot(*zip(*medians, strict=True), "o-", label=f"batch {batch}")
    axes.set_xlabel("HBM budget, GiB")
    axes.set_title(lines[0]["model"])


def name_of(line: Line) -> str:
    """The system, and of a plan's case what it pins."""
    pins = [f"{key}={value}" for key, value in line.get("case", {}).items() if key != "hbm_budget"]
    return " ".join([line["system"], *pins])


if __name__ == "__main__":
    main()
