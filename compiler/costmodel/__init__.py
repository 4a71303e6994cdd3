"""What ops cost: of a machine, of single ops, of ops that share a resource.

    machines: rates, and tables of measured ones
        hardware tables
    durations and bytes of ops: analytic, from tables, measured on the model itself
        costs tablecosts measured
    ops that run at once
        contention
"""
