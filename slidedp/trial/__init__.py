"""The first batch and the first steps: measured costs, and plans timed against one another.

        first_batch calibrate validation
"""
