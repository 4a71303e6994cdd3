"""SlideDP: full-parameter fine-tuning of models whose training state does not fit in GPU memory, compiled.

    plan = slidedp.compile(model, "auto")
    for batch in loader:
        print(plan.run(batch).loss)

The face of the package; see compiler/ (what a plan is), passes/ (how it is lowered) and executor/ (how it runs).
"""

from slidedp.agreement import StopAsked
from slidedp.api import compile
from slidedp.batch import BatchError
from slidedp.checkpoints import Checkpoint
from slidedp.compiler.costs import CostModel
from slidedp.compiler.diff import PlanDiff, diff
from slidedp.compiler.errors import TraceError
from slidedp.compiler.hardware import HardwareProfile
from slidedp.compiler.memory import MemoryReport
from slidedp.compiler.optimizer import AdamW
from slidedp.compiler.planfile import PlanFile
from slidedp.executor.adam import NonFiniteGradient
from slidedp.executor.checkpoint_files import CheckpointError
from slidedp.executor.saving import SaveHandle
from slidedp.executor.segment import HostMemoryError
from slidedp.executor.step import NonFiniteLoss, StepResult
from slidedp.executor.words import PeerError
from slidedp.explanation import Report, explain
from slidedp.paper import plan_on_paper
from slidedp.passes.verify import VerifyError
from slidedp.plan import Plan
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
