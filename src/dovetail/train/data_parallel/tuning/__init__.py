"""Planning while a model trains: what is measured, which plans are tried in real iterations, and which one is kept.

May import the room above it, and `sharded/` and `wire/` beside it. Begin with `tuner.py`; `targets.py` is what it
drives, `trials.py` decides between plans, `tuning_report.py` says what happened.
"""
