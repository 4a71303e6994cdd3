"""SlideDP: full-parameter fine-tuning of models whose training state does not fit in GPU memory, compiled.

    plan = slidedp.compile(model, "auto")
    losses = [plan.run(batch).loss for batch in loader]

This folder is the face of the package.

    what a plan is, how it is lowered, and how it runs; each folder's ``__init__.py`` has a map like this one
        compiler passes executor
    what is asked for; machines and models by name; what is kept between runs
        settings ranks batch agreement hardware presets cache progress version
    from a model and a batch to a plan
        planning
    what a plan is, what binds it, what else it could be
        reports
    the first steps, in which plans are timed against one another
        trial
    learning rates, checkpoints, the end
        schedule checkpoints saving ending
    `compile`, and the plan that it returns; plans on paper
        artefact plan api paper
    ``slidedp train``; the command line; `SlideTrainer`, in transformers' Trainer
        training commands __main__ hf
"""

from slidedp.agreement import StopAsked
from slidedp.api import compile
from slidedp.batch import BatchError
from slidedp.checkpoints import Checkpoint
from slidedp.compiler.costmodel.costs import CostModel
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.errors import TraceError
from slidedp.compiler.footprint.memory import MemoryReport
from slidedp.compiler.optimizer import AdamW
from slidedp.compiler.planfile.diff import PlanDiff, diff
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.executor.checkpoints.saving import SaveHandle
from slidedp.executor.errors import CheckpointError
from slidedp.executor.machine.step import NonFiniteLoss, StepResult
from slidedp.executor.optim.adam import NonFiniteGradient
from slidedp.executor.shared.segment import HostMemoryError
from slidedp.executor.shared.words import PeerError
from slidedp.paper import plan_on_paper
from slidedp.passes.verify import VerifyError
from slidedp.plan import Plan
from slidedp.reports.explanation import Report, explain
from slidedp.version import __version__

load_plan = PlanFile.load

__all__ = [
    "AdamW",
    "BatchError",
    "Checkpoint",
    "CheckpointError",
    "CostModel",
    "HardwareProfile",
    "HostMemoryError",
    "MemoryReport",
    "NonFiniteGradient",
    "NonFiniteLoss",
    "PeerError",
    "Plan",
    "PlanDiff",
    "PlanFile",
    "Report",
    "SaveHandle",
    "StepResult",
    "StopAsked",
    "TraceError",
    "VerifyError",
    "__version__",
    "compile",
    "diff",
    "explain",
    "load_plan",
    "plan_on_paper",
]
