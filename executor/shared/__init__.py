"""Memory that all ranks of a host share.

    segments: allocated, mapped, registered, accounted for
        segment mapping host_memory
    words that ranks write and others wait for
        words
"""
