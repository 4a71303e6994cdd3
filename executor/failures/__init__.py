"""Errors, ranks that died, ranks that hang.

        failure liveness hangs
"""
