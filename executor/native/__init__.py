"""Native host code: ``adamw.cpp`` (plain C ABI) and ``build.py``, which compiles it at first use and declares it to ctypes."""
