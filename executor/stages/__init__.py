"""The user's model, stage by stage.

    its parameters and buffers, in slots
        binding exposure buffers
    stages: values between them, graphs, what a rerun must find as it was
        stages stage_values stage_graph runners surroundings modes
    what autograd saves; gradients
        saved selective gradients
    when memory runs out
        fallback
"""
