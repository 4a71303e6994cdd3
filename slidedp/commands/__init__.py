"""The command line.

    ``slidedp`` and its commands; showing plans; ``slidedp train``
        cli show train
"""
