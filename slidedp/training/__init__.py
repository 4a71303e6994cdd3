"""``slidedp train``: what is asked for, data in order, the loop, a clean end.

    the configuration
        typed_config config
    the model and the data
        model_files documents packed_rows loader
    the loop, and what it needs
        schedule resume metrics stopping train
"""
