"""Host threads that run ops, and tickets for their completion.

    streams, their threads, their tickets; how threads share the interpreter
        streams worker tickets turns
    host ops by deadline; updates through the native queue
        priority updates
    what a watchdog may see of them
        pulse
"""
