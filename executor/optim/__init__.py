"""AdamW: on the CPU through native code or torch, on the GPU, and clipping.

    on the host
        adam kernels
    in HBM
        gpu_adam resident
    the norm
        clipping
"""
