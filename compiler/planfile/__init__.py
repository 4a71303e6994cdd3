"""Plan files, and what is recorded in them.

    the file, and its YAML
        planfile planyaml
    what was measured of the stages, and of the plan on real steps
        costrecord verdict
    two plans side by side
        diff
"""
