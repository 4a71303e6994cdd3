"""From a model and a batch to a plan: trace, decide what nobody has pinned, lower.

    what is decided: by a loaded plan, by the rule, by the solver; solved ones are kept
        autopolicy speculation plancache decide slicing
    one plan for one batch shape; all of a model's; those that take part in a trial
        specialisation recheck candidate planner
"""
