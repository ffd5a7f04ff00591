"""Write the language model of a multimodal Qwen3.5 folder, as published, to a folder of its own. It needs no GPU.

python tools/extract_text_model.py Qwen3.5-27B --output Qwen3.5-27B-text

The trainer and its engines read the written folder; transformers and vLLM load it as a text model. The vision model and
the layers that predict further tokens are left out, and the tokenizer's files are copied. Every file is verified
against the source.

All tensors are written in --dtype. Published folders have linear_attn.A_log and linear_attn.norm.weight in float32. In
bfloat16 they are rounded, as the trainer with model.dtype=bfloat16 rounds them for itself and for its engines.

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
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="default: %(default)s"
    )
    arguments = parser.parse_args()
    return exit_code(lambda: _main(arguments, terminal()))


def _main(arguments: argparse.Namespace, console: Console) -> int:
    # Deferred because importing Torch and Megatron takes seconds, which --help does not need.
    import torch

    from megatron_bapo.commands.convert import byte_progress, summary
    from megatron_bapo.trainer.conversion import text_bytes, text_hugging_face

    dtype: torch.dtype = getattr(torch, arguments.dtype)
    with byte_progress(console, arguments.source.name, text_bytes(arguments.source, dtype)) as advance:
        copied = text_hugging_face(
            arguments.source,
            arguments.output,
            dtype,
            max_file_bytes=arguments.max_file_bytes,
            advance=advance,
        )
    is_exact = dtype == torch.float32
    verified = "bit by bit against the source" if is_exact else f"against the source, rounded to {arguments.dtype}"
    console.print(summary(copied, f"to {arguments.dtype}", arguments.output, verified), soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
