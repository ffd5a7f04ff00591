"""Convert a checkpoint of the trainer or of Megatron-Core, from any layout, to a Hugging Face folder. It needs no GPU.

python tools/convert_megatron_to_hf.py runs/mine --output models/mine          # the run's newest checkpoint
python tools/convert_megatron_to_hf.py runs/mine/checkpoints/step-00000020 --output models/mine-20
python tools/convert_megatron_to_hf.py step-00000020 --origin-hf-dir models/base --output models/mine-20
python tools/convert_megatron_to_hf.py runs/mine --adapter --output adapters/mine
python tools/convert_megatron_to_hf.py megatron/checkpoints --origin-hf-dir models/base --output models/pretrained

Weights are streamed one tensor at a time in the dtype of the training, and every file is verified bit by bit against
the checkpoint. config.json and tokenizer come from the model that the run started from. Adapters (model.lora) are
merged into that model's weights; with --adapter they are written as a PEFT folder instead.

Checkpoints of Megatron-Core are those in the format torch_dist that Megatron-LM, Megatron-Bridge, NeMo and slime write:
iter_0000100 with .metadata, the folder above it, or a folder of NeMo with weights/. config.json and tokenizer come from
DIR, whose weights are not needed. Nothing in the checkpoint is run.

The output is written atomically. An interrupted conversion leaves OUTPUT.partial, which the same command continues. On
a finished output the command only verifies it.

Exit codes: 0 written and verified, 1 the written files are damaged, 2 invalid input or an output that
cannot be written, 130 interrupted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from megatron_bapo.commands.conversion_arguments import add_output_arguments
from megatron_bapo.controller.terminal import terminal
from megatron_bapo.errors import UserError, exit_code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", type=Path, help="a run directory, a checkpoint (checkpoints/step-N), or one of Megatron-Core"
    )
    add_output_arguments(parser)
    parser.add_argument(
        "--origin-hf-dir",
        type=Path,
        metavar="DIR",
        help="folder of the run's model (default: its model.path), or of a model with the checkpoint's architecture",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: the run's model.dtype, outside a run directory that of DIR/config.json",
    )
    parser.add_argument("--adapter", action="store_true", help="write the adapters of model.lora as a PEFT folder")
    arguments = parser.parse_args()
    return exit_code(lambda: _main(arguments, terminal()))


def _main(arguments: argparse.Namespace, console: Console) -> int:
    # Deferred because importing Torch and Megatron takes seconds, which --help does not need.
    import torch

    from megatron_bapo.commands.convert import byte_progress, find_checkpoint, find_megatron_source, summary
    from megatron_bapo.trainer.conversion import (
        exported_bytes,
        hugging_face_from_checkpoint,
        hugging_face_from_megatron,
        peft_from_checkpoint,
    )

    where = arguments.source, arguments.origin_hf_dir, arguments.dtype
    megatron = find_megatron_source(*where)
    found = megatron or find_checkpoint(*where)
    convert = hugging_face_from_megatron if megatron else hugging_face_from_checkpoint
    dtype: torch.dtype = getattr(torch, found.dtype)
    if arguments.adapter:
        if megatron:
            raise UserError(f"{megatron.checkpoint} is a checkpoint of Megatron-Core; convert it without --adapter")
        num_tensors = peft_from_checkpoint(found.checkpoint, found.origin, arguments.output, dtype)
        console.print(f"{arguments.output}: {num_tensors} tensors of adapters ({found.dtype})", soft_wrap=True)
        return 0
    with byte_progress(console, found.checkpoint.name, exported_bytes(found.origin, dtype)) as advance:
        copied = convert(
            found.checkpoint,
            found.origin,
            arguments.output,
            dtype,
            max_file_bytes=arguments.max_file_bytes,
            advance=advance,
        )
    dtypes = f"to {found.dtype}" if megatron else f"float32 to {found.dtype}"
    console.print(summary(copied, dtypes, arguments.output), soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
