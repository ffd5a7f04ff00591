"""Convert a Hugging Face folder of gpt-oss with experts in MXFP4, as published, to bfloat16. It needs no GPU.

python tools/dequantize_mxfp4.py gpt-oss-20b --output gpt-oss-20b-bf16

The experts get the bits that transformers gives them when it loads the folder. All other tensors are copied, and so are
the tokenizer's files. config.json has no quantization_config. Every file is verified bit by bit against the source.

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
from megatron_bapo.errors import exit_code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="Hugging Face folder: config.json and *.safetensors")
    add_output_arguments(parser)
    arguments = parser.parse_args()
    return exit_code(lambda: _main(arguments, terminal()))


def _main(arguments: argparse.Namespace, console: Console) -> int:
    # Deferred because importing Torch and Megatron takes seconds, which --help does not need.
    from megatron_bapo.commands.convert import byte_progress, summary
    from megatron_bapo.trainer.conversion import dequantized_bytes, dequantized_hugging_face

    with byte_progress(console, arguments.source.name, dequantized_bytes(arguments.source)) as advance:
        copied = dequantized_hugging_face(
            arguments.source,
            arguments.output,
            max_file_bytes=arguments.max_file_bytes,
            advance=advance,
        )
    console.print(summary(copied, "MXFP4 to bfloat16", arguments.output), soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
