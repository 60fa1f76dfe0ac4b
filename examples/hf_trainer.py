"""The Hugging Face Trainer: `dovetail.prepare(trainer)` before `train`. A small GPT-2 learns Python's own source code.

torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py [--ddp | --overlap | --plan plan.json]
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import dovetail

CONTEXT = 64  # bytes
DEFAULTS = {
    "logging_steps": 10,
    "save_strategy": "no",
    "ddp_find_unused_parameters": False,  # GPT-2 uses all its parameters
}


def text():
    """Windows of bytes from a source file of the standard library."""
    source = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    windows = source[: len(source) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    return [{"input_ids": window, "labels": window} for window in windows]


def train(prepare, folder, steps, *, resume=None, **options):
    """Logged losses, and the trainer; from a checkpoint on, if one is given."""
    set_seed(0)
    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 128, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        learning_rate=3e-3,
        per_device_train_batch_size=8,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{**DEFAULTS, **options},
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=text())
    prepare(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", action="store_true", help="torch's own wrapper, to compare with")
    parser.add_argument("--overlap", action="store_true", help="hide communication behind the next forward pass too")
    parser.add_argument("--plan", help="a plan that `dovetail plan` wrote for this model")
    given = parser.parse_args()

    def prepare(trainer):
        if not given.ddp:
            plan = dovetail.read(given.plan, dovetail.Plan) if given.plan else "auto"
            dovetail.prepare(trainer, plan=plan, overlap="forward" if given.overlap else None)

    with tempfile.TemporaryDirectory() as folder:
        _, trainer = train(prepare, folder, 30)
        if trainer.is_world_process_zero() and not given.ddp:
            print(trainer.model_wrapped.explain(), flush=True)
        trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
