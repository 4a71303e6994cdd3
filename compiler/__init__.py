"""What a plan is, and how one is found. No device and no threads: models run on meta tensors only.

A model is traced into a LayerGraph. Decisions lower it to an OpGraph (the folder passes/). A cost model and the simulator predict
the step of that graph, and the solver looks for the decisions that make it shortest.

    model -> LayerGraph: trace it, cut it into stages, group its parameters
        tracer layers metamodel recording recorder calls guards segments grouping loss metering minipipeline errors
    special stages: head and loss in chunks, embeddings by rows
        chunked_loss linear_cross_entropy liger loss_memory lookups rows
    the two graphs: stages and parameter groups; ops and their dependences, with a text form
        layergraph ops text dsl reach
    decisions: what may be decided, what the user pins, what the default rule says
        decisions policy defaults spare_hbm residency optimizer runlength
    costs: of a machine, of single ops, of ops that share a resource
        hardware tables tablecosts costs measured contention
    memory: its peak, its course over a step, as rows of a linear program, and what to do when nothing fits
        memory moments memory_over_time memoryrows budgets infeasible
    prediction: ops -> a timeline of the step
        predict simulate timeline unroll
    solver: the step as an event graph over choices, searches, and CP-SAT
        choices frames eventgraph eventbuild eventparts eventmoves eventresident eventrings eventupdates eventcosts
        maxplus search structured exchange solver
    bounds: how near to the best a plan is
        cyclebound counts relaxation detours nested queues proven
    plan files, and what is recorded in them
        planfile planyaml costrecord verdict diff
    drawings of timelines and memory
        binds gantt svg memory_chart trace_events
    strict YAML, and byte sizes
        strict units
"""
