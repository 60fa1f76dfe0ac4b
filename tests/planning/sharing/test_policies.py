"""The scheduling policies by name."""

from __future__ import annotations

import pytest

from dovetail.core.errors import Error
from dovetail.planning.sharing.policies import POLICIES, policy


def test_an_unknown_policy_is_refused_with_the_names_of_the_known_ones() -> None:
    wanted = {
        "jigsaw",
        "gang-fifo",
        "gang-fifo-backfill",
        "gang-easy-backfill",
        "gang-srsf",
        "tiresias-las",
        "gandiva-timeslice",
        "static-partition",
    }
    assert wanted <= set(POLICIES)
    assert policy("jigsaw", duty_cap=1.3).rules.duty_cap == 1.3
    with pytest.raises(Error, match="gang-srsf"):
        policy("fifo")
