"""What runs the steps of a plan: the machine, its exchange of one plan for another, and the interpreter of an OpGraph.

    the machine
        machine switching
    a step: closures of the graph's ops, submitted in the order of its text
        interpreter closures graph_facts step step_updates
"""
