"""The language model inside the files of a multimodal one (Qwen3.5), as a folder of text models has it.

Published folders have all experts of a layer in one tensor, gate and up behind each other, and transformers writes them
one by one; the trainer reads the latter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_bapo.errors import UserError
from megatron_bapo.files import read_json_object
from megatron_bapo.model.hf_mapping import Shape
from megatron_bapo.model.hf_table import OUTPUT_LAYER
from megatron_bapo.model.stacked_experts import Tensors

_CLASSES = {"qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}
_PREFIX = "model.language_model."
_STACKED = re.compile(r"(.*\.mlp\.experts\.)(gate_up|down)_proj")
_MODULES = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


def text_fields(source: Path) -> dict[str, Any]:
    """Return the config.json of the language model in the folder `source`. Raises UserError for another folder."""
    fields = read_json_object(source / "config.json") if (source / "config.json").is_file() else {}
    text = fields.get("text_config")
    kind = text.get("model_type") if isinstance(text, dict) else None
    if not isinstance(text, dict) or kind not in _CLASSES:
        raise UserError(
            f"{source} has no config.json whose text_config.model_type is {' or '.join(_CLASSES)}; give the folder of "
            "a multimodal Qwen3.5 model"
        )
    outer = {name: fields[name] for name in ("dtype", "torch_dtype", "tie_word_embeddings") if name in fields}
    return {"architectures": [_CLASSES[kind]], **outer, **text}


@dataclass(frozen=True)
class TextModel:
    """Tensors of the language model by the names that they have in a folder of its own."""

    folder: Tensors

    @cached_property
    def _parts(self) -> dict[str, tuple[str, Shape, tuple[Any, ...]]]:
        """Name -> (name in the folder, shape, index of its part)."""
        parts: dict[str, tuple[str, Shape, tuple[Any, ...]]] = {}
        for name, shape in self.folder.shapes().items():
            if not name.startswith(_PREFIX):
                if name == OUTPUT_LAYER:
                    parts[name] = name, shape, ()
                continue
            own = "model." + name.removeprefix(_PREFIX)
            stacked = _STACKED.fullmatch(own)
            if stacked is None:
                parts[own] = name, shape, ()
                continue
            modules = _MODULES[stacked[2]]
            num_rows = shape[1] // len(modules)
            for expert in range(shape[0]):
                for index, module in enumerate(modules):
                    rows = slice(index * num_rows, (index + 1) * num_rows)
                    parts[f"{stacked[1]}{expert}.{module}.weight"] = name, (num_rows, *shape[2:]), (expert, rows)
        return parts

    def shapes(self) -> dict[str, Shape]:
        return {name: shape for name, (_, shape, _) in self._parts.items()}

    def slice(self, name: str) -> Any:
        in_folder, _, index = self._parts[name]
        view = self.folder.slice(in_folder)
        if not index:
            return view
        expert, rows = index
        return view[expert : expert + 1, rows][0]
