"""Checkpoints, also beside training.

    files
        checkpoint checkpoint_files checkpoint_moments tensor_files
    saving, and the bytes of a step while the next one runs
        saving snapshot
"""
