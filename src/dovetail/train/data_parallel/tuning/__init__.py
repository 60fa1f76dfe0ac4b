"""Planning while a model trains: what is measured, which plans are tried in real iterations, and which one is kept.

May import the room above it, and `sharded/` and `wire/` beside it. Begin with `tuner.py`; `targets.py` is what it
drives, `trials.py` lets plans compete, `verdict.py` decides between them, `look_back.py` asks again later, and
`tuning_report.py` says what happened.
"""
