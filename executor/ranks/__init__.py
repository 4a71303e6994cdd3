"""Ranks of one host: collectives, and when all are there.

        collectives meetings skew
"""
