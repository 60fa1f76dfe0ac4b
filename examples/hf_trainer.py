"""The Hugging Face Trainer: `plan.apply(trainer)` before `train`. A small GPT-2 learns Python's own source code.

torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py [--plan plan.json]
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import dovetail
from dovetail.train.integrations import buckets

CONTEXT = 64  # bytes


def text():
    """Windows of bytes from a source file of the standard library."""
    source = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    windows = source[: len(source) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    return [{"input_ids": window, "labels": window} for window in windows]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", help="a plan that `dovetail plan` wrote for this model")
    path = parser.parse_args().plan

    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 128, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    data = text()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=30,
            logging_steps=10,
            learning_rate=3e-3,
            per_device_train_batch_size=8,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            ddp_find_unused_parameters=False,  # GPT-2 uses all its parameters, and a plan needs torch to rely on it
        )
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
        if path:
            plan = dovetail.read(path, dovetail.Plan)
        else:
            batch = {key: torch.stack([sample[key] for sample in data[:8]]) for key in data[0]}
            profile = dovetail.measure.profile(trainer.model, batch)
            plan = dovetail.plan(profile, dovetail.measure.preset("10gbe-2"))

        plan.apply(trainer)
        trainer.train()
        if trainer.is_world_process_zero():
            print(f"plan by {plan.policy}: buckets of {[b.bytes for b in plan.buckets]} bytes")
            print(f"torch uses buckets of {buckets(trainer.model_wrapped)} bytes", flush=True)
        trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
