"""Convert a Hugging Face folder to a checkpoint of the trainer, which every layout can load. It needs no GPU.

python tools/convert_hf_to_megatron.py models/base --output models/base-checkpoint

`train` reads Hugging Face folders itself (model.path); a checkpoint is for programs that load only checkpoints. The
format is this trainer's (safetensors with Hugging Face names), not Megatron-LM's. The checkpoint is the state before
the first update: weights in float32, and Adam's moments, which are zero, are not stored. Weights are streamed one
tensor at a time, and every file is verified bit by bit against the source. The output is written atomically. An
interrupted conversion leaves OUTPUT.partial, which the same command continues. On a finished output the command only
verifies it.

`convert_megatron_to_hf.py OUTPUT --origin-hf-dir SOURCE` converts it back, bit for bit.

Exit codes: 0 written and verified, 1 the written files are damaged, 2 invalid input or an output that
cannot be written, 130 interrupted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from megatron_bapo.commands.conversion_arguments import add_output_arguments
from megatron_bapo.controller.terminal import terminal
from megatron_bapo.errors import exit_code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="Hugging Face folder: config.json and *.safetensors")
    add_output_arguments(parser, "checkpoint folder to write")
    arguments = parser.parse_args()
    return exit_code(lambda: _main(arguments, terminal()))


def _main(arguments: argparse.Namespace, console: Console) -> int:
    # Deferred because importing Torch and Megatron takes seconds, which --help does not need.
    from megatron_bapo.commands.convert import byte_progress, summary
    from megatron_bapo.controller.run_state import RunState
    from megatron_bapo.trainer.conversion import checkpoint_bytes, checkpoint_from_hugging_face

    with byte_progress(console, arguments.source.name, checkpoint_bytes(arguments.source)) as advance:
        copied = checkpoint_from_hugging_face(
            arguments.source,
            arguments.output,
            RunState().to_json(),
            max_file_bytes=arguments.max_file_bytes,
            advance=advance,
        )
    console.print(summary(copied, "to float32", arguments.output), soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
