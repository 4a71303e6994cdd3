"""The learning rates of a ``slidedp train`` run: one of transformers' schedules, by name, over its number of steps."""

from __future__ import annotations

from typing import Any

from slidedp.compiler.strict import closest
from slidedp.schedule import LearningRate
from slidedp.training.config import TrainConfig

NO_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Names of `transformers.get_scheduler` that are refused: they want a metric at every step."""

LOOKS = 16
"""At so many of the steps that are left, schedules are compared."""


def check_schedule(name: str) -> None:
    from transformers.trainer_utils import SchedulerType

    names = [s.value for s in SchedulerType if s.value not in NO_SCHEDULES]
    if name not in names:
        raise ValueError(f"schedule.name: {name!r} is unknown; {closest(name, names)}allowed: {', '.join(names)}")


def make_scheduler(config: TrainConfig, optimizer: LearningRate, num_steps: int) -> Any:
    """ValueError for options that the schedule does not take."""
    from transformers import get_scheduler

    s = config.schedule
    options = dict(s.options)
    if s.name == "warmup_stable_decay" and not options.keys() & {"num_decay_steps", "num_stable_steps"}:
        options["num_decay_steps"] = max(1, num_steps // 10)
    try:
        return get_scheduler(s.name, optimizer, s.warmup_steps(num_steps), num_steps, options)
    except (TypeError, ValueError) as e:
        raise ValueError(f"schedule.options: {s.name} does not take them: {e}") from e


def other_rates(config: TrainConfig, num_steps: int, done: int, before: int) -> str:
    """What to say of a schedule that was over `before` steps until step `done`, and has other rates now; '' if it has not."""
    def rates(steps: int) -> list[float]:
        scheduler = make_scheduler(config, LearningRate(config.optimizer.lr), steps)
        return [scheduler.lr_lambdas[0](done + (end - done) * i // LOOKS) for i in range(LOOKS)]

    end = max(min(before, num_steps), done)
    if before == num_steps or rates(before) == rates(num_steps):
        return ""
    return (f"warning: a run of {num_steps} steps now, of {before} until step {done}: from here on the learning rates are "
            f"those that the {config.schedule.name} schedule has over {num_steps} steps")


def other_lr(config: TrainConfig, resumed: float) -> str:
    """What to say where the run that is gone on with has another base learning rate than the config; '' where it has the same."""
    if resumed == config.optimizer.lr:
        return ""
    return (f"warning: optimizer.lr is {config.optimizer.lr:g} here, but the run that is gone on with has {resumed:g}, which "
            "stays; for another, begin a new run from the model that this one exports")
