"""Host threads that run ops, and tickets for their completion.

    streams, their threads, their tickets
        streams worker tickets
    host ops by deadline; updates through the native queue
        priority updates
    what a watchdog may see of them
        pulse
"""
