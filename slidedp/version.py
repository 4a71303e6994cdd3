"""The version of the package, as plan files record it."""

__version__ = "0.1.0"
