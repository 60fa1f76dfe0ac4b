"""A job's tasks on an accelerator: its tensors on the device, their copies, and the memory that jobs share there.

May import `cluster.job`, `cluster.transport`, `cluster.accelerators` and `executor.task_runner`; knows no leases.
Begin with `device_runner.py` (one task), then `task_device.py` (the device) and `device_tensors.py` (one job's memory).
"""
