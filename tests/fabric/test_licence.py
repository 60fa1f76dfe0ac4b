"""The licence in every C file is the one that the kernel is told: some of its functions are for GPL programs only."""

from __future__ import annotations

from dovetail.fabric import kernel
from tests.paths import BENCHMARKS

FOR_THE_KERNEL = [*kernel.BPF_DIR.iterdir(), *(BENCHMARKS / "fabric_bpf").glob("*.bpf.c")]


def test_programs_for_the_kernel_are_under_the_project_s_licence_or_the_one_they_declare() -> None:
    assert len(FOR_THE_KERNEL) > 10
    for path in FOR_THE_KERNEL:
        text = path.read_text()
        assert text.startswith("/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */\n"), path
        declared = 'SEC("license") = "GPL v2";' in text
        assert declared == path.name.endswith(".bpf.c"), path


def test_programs_for_people_are_under_the_project_s_licence() -> None:
    for path in (BENCHMARKS / "fabric_bpf").glob("*.c"):
        if path not in FOR_THE_KERNEL:
            assert path.read_text().startswith("/* SPDX-License-Identifier: Apache-2.0 */\n"), path
