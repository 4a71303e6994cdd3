"""FP32 masters and moments on the host, once for all ranks.

        host_state state_layout sides
"""
