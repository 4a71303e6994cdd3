"""Measurement on the real machine, with the executor's own streams, memory and kernels: it times what a step does.

    lab.py        ops kept running on several streams at once, each timed as `Plan.measure` times it
    rig.py        a host state of one group, and device buffers: what there is to copy, cast and update
    caches.py     how large the last-level caches are: what is walked through is several times as large
    links.py      copies by size: each direction alone, both at once, one rank and all
    host.py       cast and update, by threads, alone and beside the copies; what a task costs the host
    compute.py    matrix products, device memory, the fixed cost of an op on the device
    peers.py      collectives by size
    machine.py    all of these, in order: the figures of a hardware profile
    stages.py     a model's own stages, two of each kind, on random weights: time and memory of each phase
"""
