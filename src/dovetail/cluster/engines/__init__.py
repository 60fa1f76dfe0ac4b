"""Who starts and watches processes: `local` on one machine, `ray` on several.

May import `cluster.transport`.
Begin with `base.py`.
"""
