"""Drawings of timelines and memory.

    as text
        gantt memory_chart
    as SVG
        svg
    what binds a step
        binds
    for ui.perfetto.dev
        trace_events
"""
