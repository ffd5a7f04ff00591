"""The files that a finished run leaves: the model in Hugging Face format, and its adapters in PEFT's."""

from __future__ import annotations

from pathlib import Path

from megatron_bapo.model.hf_export import save_hugging_face
from megatron_bapo.model.peft_folder import save_adapters
from megatron_bapo.trainer.worker import Worker


def export(worker: Worker, folder: Path, adapter_folder: Path) -> None:
    """Write the model to `folder`, with adapters merged, and the adapters, if there are any, to `adapter_folder`."""
    model, config = worker.model, worker.config
    save_hugging_face(model, worker.groups, config.model_path, folder)
    if config.model.lora is not None:
        save_adapters(model, config.model.lora, worker.groups, config.model_path, adapter_folder)
