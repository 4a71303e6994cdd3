"""What was published of SlideDP on A800 machines, and what the shipped profiles give. Needs no GPU, no weights.

Qwen3-14B, full-parameter fine-tuning. Nothing is tuned to a case: every line comes from three profiles of one host, which differ
in the number of GPUs that share it and in whether there is a link between them. What is assumed, since it was not published:

- sequences of 512 tokens and full recompute. The rate of the GPU is fitted to the compute-only reference (27.2 s on 4 for 256
  sequences), so only the time a sequence takes matters, not its length. Layers must be recomputed, because 64 sequences a
  GPU do not fit 80 GB otherwise; at 1024 tokens that would be 87 % of the datasheet's peak, which nothing reaches;
- one host, the same for 4 and 8 GPUs, whose memory moves 70 GB/s: that is where published casts for two GPUs stop. It matters:
  at 60, 80 and 100 GB/s the gains are 35, 26 and 14 % with a link, and 15, 16 and 20 % without;
- both routes deliver the BF16 shadow that the update keeps, and gradients are summed between the GPUs. (When every rank casts
  for itself, `--fix source=cast`, sharding wins with and without a link: the published gain of the replicated route is then out
  of reach, as each rank's cast of the whole model is too much for this host.);
- without a link, collectives go through host memory;
- the published 14.4 s on 8 are a whole step; computing alone is half of 27.2 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slidedp.compiler.decisions import Route
from slidedp.compiler.ops import Stream
from slidedp.compiler.simulation.timeline import Timeline
from slidedp.hardware import load_profile
from slidedp.reports.sweep import Case, Sweep

MODEL, SEQ = "qwen3-14b", 512


@dataclass(frozen=True)
class Finding:
    what: str
    published: str
    simulated: float
    unit: str
    by_the_rule: bool = False
    """The default rule, left alone, takes the better route."""

    def __str__(self) -> str:
        note = "  the rule's choice" if self.by_the_rule else ""
        return f"{self.what:<53} {self.published:>12} {self.simulated:>10.1f} {self.unit:<2}{note}"


def findings() -> Iterator[Finding]:
    bridged = Sweep(MODEL, load_profile("a800x4-nvlink"), seq=SEQ)
    unbridged, eight = bridged.on(load_profile("a800x4-pcie")), bridged.on(load_profile("a800x8-nvlink"))

    replicated, sharded = both_routes(bridged, 16)
    better = gain(sharded, replicated)
    yield Finding("4 A800, 16 a GPU, NVLink: sharded over replicated", "+17", better, "%", sharded.chosen)

    replicated, sharded = both_routes(unbridged, 16)
    better = gain(replicated, sharded)
    yield Finding("4 A800, 16 a GPU, no NVLink: replicated over sharded", "+26", better, "%", replicated.chosen)

    compute = timeline(bridged.case(64, 4, Route.SHARDED)).busy_us[Stream.GPU]
    yield Finding("4 A800, 256 sequences, compute only (fitted)", "27.2", compute / 1e6, "s")

    step = timeline(eight.case(32, 8, Route.SHARDED)).step_us
    yield Finding("8 A800, 256 sequences, a step", "14.4", step / 1e6, "s")

    replicated, sharded = both_routes(eight, 64)
    yield Finding("8 A800, 64 a GPU: sharded over replicated", "within 2.5", gain(sharded, replicated), "%", sharded.chosen)


def both_routes(sweep: Sweep, batch: int) -> list[Case]:
    """On all GPUs of the machine."""
    return list(sweep.cases([batch], [sweep.hw.num_gpus], [Route.REPLICATED, Route.SHARDED]))


def gain(one: Case, other: Case) -> float:
    """How many percent more tokens a second `one` makes."""
    return 100 * (one.tokens_per_s / other.tokens_per_s - 1)


def timeline(case: Case) -> Timeline:
    assert case.timeline, case.problem
    return case.timeline


def main() -> None:
    print(f"{MODEL + ', sequence ' + str(SEQ):<53} {'published':>12} {'simulated':>10}")
    for finding in findings():
        print(finding, flush=True)


if __name__ == "__main__":
    main()
