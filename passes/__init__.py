"""From LayerGraph and decisions to a verified OpGraph: one pass a file, in the order of pipeline.py.

    what passes share, and the order in which they run
        base pipeline
    insert ops: compute, buffers, transfers, collectives, updates
        compute slots delivery activations gradients updates rows residency clipping
    insert edges, and remove those that others imply
        dependences prune
    for a step beside which a checkpoint is written
        snapshot
    the verifier, which derives for itself what must be ordered
        requirements verify
"""
