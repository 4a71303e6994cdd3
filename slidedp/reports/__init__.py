"""What a plan is, what binds it, what else it could be.

    in words, with what forced alternatives would cost
        report explanation what_if
    of several plans: batches, budgets, ranks; what a model needs
        sweep sensitivity estimate
    as a page
        page
"""
