"""How a plan runs: host state, buffers, streams, collectives, updates, and one interpreter for any OpGraph.

machine.py owns it all, and its docstring says how the parts are connected.

    the machine, and its exchange of one plan for another
        machine options switching
    a step: closures of the graph's ops, submitted in the order of its text
        interpreter closures graph_facts step step_updates
    streams: host threads that run ops, and tickets for their completion
        streams worker tickets priority updates
    devices and their memory
        backend devices cuda allocator garbage buffers parcels
    the user's model, stage by stage
        binding exposure stages stage_values stage_graph runners surroundings saved selective gradients fallback
    state: FP32 masters and moments on the host, or in HBM
        host_state state_layout segment mapping host_memory sides resident
    the optimizer: AdamW, clipping, and native code for the CPU
        adam gpu_adam kernels clipping native
    ranks of one host: collectives, and what they tell one another through shared memory
        collectives words meetings skew
    failures: errors, ranks that died, ranks that hang
        failure liveness hangs pulse
    checkpoints, also beside training
        checkpoint checkpoint_files checkpoint_moments tensor_files saving snapshot
    measurement of this machine, for the cost model
        measure
"""
