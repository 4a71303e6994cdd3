"""How a plan runs: host state, buffers, streams, collectives, updates, and one interpreter for any OpGraph.

machine/machine.py owns it all, and its docstring says how the parts are connected. Imports point up in this list, never down:

    what the user may choose about running; errors
        options errors
    native code for the CPU; memory that ranks share
        native shared
    host threads that run ops; the device behind them; ranks
        streams devices ranks
    FP32 masters and moments on the host; the user's model, stage by stage; AdamW
        state stages optim
    errors and ranks that have died; checkpoints
        failures checkpoints
    what runs the steps of a plan
        machine
    measurement of this machine, for the cost model
        measure
"""
