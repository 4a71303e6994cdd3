"""What the compiler raises when a model cannot become a plan."""

from __future__ import annotations


class TraceError(ValueError):
    """The model, or what it does between layers, cannot be traced. Names the thing and the remedy."""


class BudgetError(ValueError):
    """A plan, or every plan, needs more memory than a budget. The message names it, the bytes missing, and a way out."""
