"""Bytes of a step: where they are, when they are most, and what a budget leaves.

    the peak, at the moments where it may be
        memory moments
    over a step; within a budget
        memory_over_time budgets
"""
