"""Every block of Python on the page about training libraries runs, in two ranks, and gives dovetail's wrapper."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tests.ranks import run_ranks

from .blocks import blocks

STRATEGIES = "dovetail.train.integrations.lightning"
PAGE = ROOT / "docs" / "integrations.md"

BEFORE = {
    "torchrun": "",
    "Lightning": "import lightning",
    "Lightning Fabric": "from lightning.fabric import Fabric",
    "Accelerate": "from accelerate import Accelerator; accelerator = Accelerator(cpu=True)",
    "Hugging Face Trainer": """
from transformers import Trainer, TrainingArguments
import torch
class WithLoss(torch.nn.Linear):
    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(super().forward(x), labels)}
data = [{"x": torch.randn(8), "labels": torch.tensor(i % 4)} for i in range(64)]
arguments = TrainingArguments(folder, use_cpu=True, max_steps=2, save_strategy="no", report_to=[])
trainer = Trainer(WithLoss(8, 4), arguments, train_dataset=data)
""",
    "A stored plan": "import dovetail, os; os.chdir(folder)",
    "Every rank needs the same plan": """
import dovetail
profile, network = dovetail.measure.profile(model, batch), dovetail.measure.preset("10gbe-2")
""",
}
"""Section → what a reader has before its blocks. Ray's section is run in a worker of Ray's (tests/train)."""
ELSEWHERE = {"Ray Train"}


def sections() -> list[tuple[str, str]]:
    """(section, code) of every block of Python."""
    found = []
    parts = PAGE.read_text(encoding="utf-8").split("\n## ")
    for block in blocks(PAGE):
        if block.language == "python":
            (title,) = [part.partition("\n")[0] for part in parts if block.text in part]
            found.append((title, block.text))
    return found


def in_ranks(folder: str) -> dict[str, list[str]]:
    """Section → the types of `model`, `strategy` or the like after its blocks."""
    import torch
    from accelerate.state import AcceleratorState

    seen: dict[str, list[str]] = {}
    for title, code in sections():
        if title not in BEFORE:
            continue
        linear = torch.nn.Linear(8, 4)
        data = torch.utils.data.TensorDataset(torch.randn(8, 8))
        names: dict[str, Any] = {
            "model": linear,
            "optimizer": torch.optim.SGD(linear.parameters(), 0.1),
            "loader": torch.utils.data.DataLoader(data),
            "batch": torch.randn(4, 8),
            "folder": os.path.join(folder, os.environ["RANK"]),  # noqa: PTH118
        }
        Path(names["folder"]).mkdir(exist_ok=True)
        here = Path.cwd()
        exec(BEFORE[title], names)
        exec(code, names)
        os.chdir(here)
        AcceleratorState._reset_state(reset_partial_state=True)
        made = [names["trainer"].model_wrapped if title.startswith("Hugging") else names["model"]]
        made += [names[n].strategy for n in ("trainer", "fabric") if hasattr(names.get(n), "strategy")]
        seen.setdefault(title, []).extend(f"{type(one).__module__}.{type(one).__name__}" for one in made)
    return seen


def test_every_block_of_the_page_runs(tmp_path: Path) -> None:
    for package in ("lightning", "accelerate", "transformers"):
        pytest.importorskip(package, reason="needs dovetail-train[examples]")
    assert {title for title, _ in sections()} == BEFORE.keys() | ELSEWHERE
    for seen in run_ranks(in_ranks, folder=str(tmp_path)):
        for title in ("torchrun", "Accelerate", "Hugging Face Trainer"):
            assert seen[title] == ["dovetail.train.data_parallel.module.DistributedDataParallel"]
        assert seen["Lightning"][1::2] == [f"{STRATEGIES}.DovetailStrategy"] * 2
        assert seen["Lightning Fabric"][1:] == [f"{STRATEGIES}.DovetailFabricStrategy"]
