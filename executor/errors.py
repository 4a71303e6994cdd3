"""What users catch that more than one folder raises."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or another model's; says which and why."""
