"""Many jobs on shared devices (after JigSaw): admission, packing, order, and which task runs next.

Pure functions of what devices hold, called by the simulator and by the cluster; may import `core`.
Begin with `policies.py` (the schedulers by name), then `pack.py` and `dispatch.py`; `baselines.py` is for gangs only.
"""
