"""A model becomes a LayerGraph: its own Python runs on meta tensors, and every call between layers is written down.

    the recorder, and what it may not see
        recorder calls guards recording
    layers, their kinds, and the parameters of each
        tracer layers segments grouping metamodel minipipeline
    what a stage computes and moves
        metering metakernels
    the loss; head and loss in chunks; embeddings by rows
        loss chunked_loss linear_cross_entropy liger loss_memory lookups
"""
