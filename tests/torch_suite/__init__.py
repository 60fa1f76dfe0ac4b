"""torch's own tests of DistributedDataParallel, run with torch's class and with dovetail's in its place.

Begin with `runner.py` (`make torch-tests`); `ranks.py` runs the tests of one contestant, `contestants.py` puts dovetail
in the place of torch's class, `host_device.py` answers for the accelerator that most of these tests ask for. What each
test did is in `expected.json`, and for readers in docs/torch-tests.md.
"""
