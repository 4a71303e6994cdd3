"""A priced OpGraph becomes a timeline of its steady step.

    from ops to spans
        predict simulate issuing unroll
    what came out, predicted or measured
        timeline
"""
