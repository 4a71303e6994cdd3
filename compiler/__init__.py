"""What a plan is, and how one is found. No device and no threads: models run on meta tensors only.

A model is traced into a LayerGraph. Decisions lower it to an OpGraph (the folder passes/). A cost model and the simulator predict
the step of that graph, and the solver looks for the decisions that make it shortest. Imports point up in this list, never down:

    the two graphs: stages and parameter groups; ops and their dependences, with a text form
        layergraph ops text dsl reach
    decisions: what may be decided, what the user pins; the optimizer's rule
        decisions policy residency rows optimizer runlength
    strict YAML, byte sizes, errors
        strict units errors
    model -> LayerGraph
        tracing
    costs of ops; a timeline of them; its memory
        costmodel simulation footprint
    the step over all that may be chosen; decisions that make it short
        eventgraph solver
    plan files; drawings
        planfile drawing
"""
