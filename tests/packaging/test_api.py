"""`import dovetail` shows a dozen names, each of them real, and costs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dovetail


def test_the_public_names_are_these() -> None:
    assert dovetail.__all__ == [
        "Burst",
        "DepthPlan",
        "DistributedDataParallel",
        "Error",
        "Guard",
        "InputError",
        "Network",
        "PartialBackprop",
        "Plan",
        "Profile",
        "Timeline",
        "TrainingJob",
        "Tuning",
        "compare",
        "full_state",
        "measure",
        "optimizer",
        "plan",
        "prepare",
        "read",
        "write",
    ]
    assert all(getattr(dovetail, name) is not None for name in dovetail.__all__)
    assert sorted(dir(dovetail)) == sorted([*dovetail.__all__, "__version__"])
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        dovetail.nonsense  # noqa: B018


def test_importing_dovetail_and_its_plain_names_imports_no_torch() -> None:
    code = "import dovetail, sys; dovetail.Plan, dovetail.Guard, dovetail.plan, dovetail.read, dovetail.TrainingJob"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_ours_is_a_subclass_of_torchs_with_the_same_arguments() -> None:
    import inspect

    from torch.nn.parallel import DistributedDataParallel

    assert issubclass(dovetail.DistributedDataParallel, DistributedDataParallel)
    extra = set(inspect.signature(dovetail.DistributedDataParallel.__init__).parameters) - {"args", "kwargs"}
    assert extra == {"self", "module", "plan", "tuning", "overlap", "memory", "precision"}
