"""A folder for the path of processes that a script under `dovetail train` starts: see `dovetail.train.run.descendants`.

Nobody imports it; Python itself finds `sitecustomize` in it.
"""
