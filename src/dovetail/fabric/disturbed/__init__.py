"""Training over a fabric while its links fail and heal: `dovetail demo --fabric`.

May import the rest of `fabric`. Begin with `demo.py`; `disturbed_run.py` starts the ranks (`worker.py`) on hosts.
"""
