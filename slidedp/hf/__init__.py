"""`SlideTrainer`, a transformers Trainer whose training step is `plan.run`.

    from slidedp.hf import SlideTrainer

        trainer arguments checkpoints
"""

from slidedp.hf.trainer import SlideTrainer

__all__ = ["SlideTrainer"]
