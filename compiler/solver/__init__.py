"""Decisions: what the default rule says, what searches and CP-SAT find, and how near to the best that is.

    without a search
        defaults spare_hbm
    searches, and CP-SAT
        search structured exchange solver
    bounds
        cyclebound counts relaxation detours nested queues proven
    when nothing fits
        infeasible
"""
