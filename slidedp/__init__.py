"""SlideDP: full-parameter fine-tuning of models whose training state does not fit in GPU memory, compiled.

    plan = slidedp.compile(model, "auto")
    for batch in loader:
        print(plan.run(batch).loss)

The face of the package; see compiler/ (what a plan is), passes/ (how it is lowered) and executor/ (how it runs).
"""

__version__ = "0.1.0"

from slidedp.api import compile
from slidedp.compiler.costs import CostModel
from slidedp.compiler.diff import PlanDiff, diff
from slidedp.compiler.hardware import HardwareProfile
from slidedp.compiler.optimizer import AdamW
from slidedp.compiler.planfile import PlanFile
from slidedp.executor.step import StepResult
from slidedp.plan import Plan

load_plan = PlanFile.load

__all__ = ["AdamW", "CostModel", "HardwareProfile", "Plan", "PlanDiff", "PlanFile", "StepResult", "compile", "diff", "load_plan"]
