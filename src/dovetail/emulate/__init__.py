"""What stands in for hardware: devices that wait for profiled times, networks of limited rate, ranks as processes.

May import `core`, `measure`, `planning`, `simulate` and `train`; needs torch, shaped networks need root.
Begin with `device.py`; `contest.py` compares plans on it. `accelerator/` is a device of torch with a GPU's rules, and
`training/` runs unchanged scripts on it.
"""
