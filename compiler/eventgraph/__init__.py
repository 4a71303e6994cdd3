"""The step over all that may be chosen: a timed event graph, and its rows of memory.

    choices, and what they cost
        choices frames eventcosts
    the graph
        eventgraph eventbuild eventparts eventmoves eventresident eventrings eventupdates
    its period under one choice; its memory under any
        maxplus memoryrows
"""
