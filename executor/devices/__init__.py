"""A device, its streams and its memory.

    the interface, and the CPU; CUDA; which of them
        backend cuda devices
    device memory, and what keeps it
        allocator garbage
    tensors that move to the host and back
        parcels
"""
