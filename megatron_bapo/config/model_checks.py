"""Rules of the model and the teacher: the contents of their folders, and whether the parallel layout can split them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megatron_bapo.config.architecture import FAMILIES, WEIGHTS_INDEX, Architecture, listed_files, read_architecture
from megatron_bapo.config.fp8_checks import transformer_engine_shape_problems
from megatron_bapo.config.hub_ids import is_hub_id
from megatron_bapo.config.linear_attention_checks import (
    engine_linear_problems,
    policy_linear_problems,
    trainer_linear_problems,
)
from megatron_bapo.config.lora_checks import lora_shape_problems, lora_transfer_problems
from megatron_bapo.config.model import CreateModelConfig
from megatron_bapo.config.padding import round_up
from megatron_bapo.config.pipeline_layers import division_problems
from megatron_bapo.config.rollout import EngineSizeConfig
from megatron_bapo.config.schema import Config, ParallelConfig
from megatron_bapo.config.sink_checks import engine_sink_problems, policy_sink_problems, trainer_sink_problems
from megatron_bapo.errors import UserError

TEACHER, TEACHER_ENGINES = "algorithm.distillation.teacher", "algorithm.distillation.engines"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
CHECKPOINT_CONTENTS = "config.json, *.safetensors and the tokenizer's files (tokenizer.json)"
VLLM_VOCAB_MULTIPLE = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE
EXPERT_BLOCK = 128
"""vLLM rounds the width of an expert's part on one GPU up to a multiple of this where its kernels need it."""
_OWNERS = {"Qwen": "Qwen", "DeepSeek-": "deepseek-ai", "GLM-": "zai-org", "OctoThinker-": "OctoThinker"}
"""Beginnings of the names of models that the recipes train -> their owners on the Hugging Face Hub."""


def model_problems(config: Config) -> Iterator[str]:
    """Yield the broken rules, one line each."""
    if config.model.create is not None:
        yield from shape_problems(config, created_architecture(config.model.create), "model.create")
        return
    folder = config.model.path
    assert folder is not None, "the schema requires path or create"
    yield from _checkpoint_problems("model.path", folder, lambda found, where: shape_problems(config, found, where))


def teacher_problems(config: Config) -> Iterator[str]:
    """Yield the broken rules of `algorithm.distillation.teacher`, one line each."""
    distillation = config.algorithm.distillation
    if distillation is not None:
        policy = policy_architecture(config)
        yield from _checkpoint_problems(
            TEACHER, distillation.teacher, lambda found, where: teacher_shape_problems(config, found, where, policy)
        )


def policy_architecture(config: Config) -> Architecture | None:
    """Return the policy's architecture; None if it cannot be read, which the rules of model.path report."""
    if config.model.create is not None:
        return created_architecture(config.model.create)
    assert config.model.path is not None, "the schema requires path or create"
    with suppress(UserError):
        return read_architecture(config.model.path)
    return None


def _checkpoint_problems(
    key: str, folder: Path, shape_rules: Callable[[Architecture, str], Iterator[str]]
) -> Iterator[str]:
    """Yield the broken rules of the checkpoint that `key` names; `shape_rules` takes its architecture and source."""
    if not folder.is_dir():
        yield (
            f"{key}={folder} must be an existing folder of a Hugging Face checkpoint, with {CHECKPOINT_CONTENTS}; "
            f"relative paths start at {Path.cwd()}{download_hint(folder, key)}"
        )
        return
    yield from _folder_problems(key, folder)
    if not (folder / "config.json").is_file():
        return
    try:
        architecture = read_architecture(folder)
    except UserError as error:
        yield from str(error).splitlines()
        return
    yield from shape_rules(architecture, str(folder / "config.json"))


def download_hint(path: Path, key: str = "model.path") -> str:
    """Return how to download the model if a missing `path` reads like a model id of the Hugging Face Hub.

    A folder with the name of a published model gets the command as well; any other path gets "".
    """
    if not is_hub_id(str(path)) or Path(path.parts[0]).is_dir():
        owner = next((owner for name, owner in _OWNERS.items() if path.name.startswith(name)), None)
        return f". `hf download {owner}/{path.name} --local-dir {path}` downloads the published model" if owner else ""
    local = Path("models", path.name)
    return (
        f". If {path} is a model on the Hugging Face Hub, download it with `hf download {path} --local-dir {local}` "
        f"and set {key}={local}"
    )


def created_architecture(settings: CreateModelConfig) -> Architecture:
    """Return the architecture of the checkpoint that `model.create` describes."""
    shape = settings.model_dump(exclude={"initializer_range"})
    return Architecture(family=FAMILIES["qwen3"], rms_norm_eps=1e-6, rope_theta=10000.0, **shape)


def _folder_problems(key: str, folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        yield f"{key}={folder} has no config.json; the folder must contain {CHECKPOINT_CONTENTS}"
    if not any(folder.glob("*.safetensors")):
        yield (
            f"{key}={folder} has no *.safetensors, the only supported format of weights; convert them "
            "(tools/convert_gguf.py, tools/convert_megatron_to_hf.py, or save_pretrained of transformers)"
        )
    else:
        yield from _weights_problems(key, folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield f"{key}={folder} has no tokenizer ({', '.join(TOKENIZER_FILES)}); copy the tokenizer's files there"


def _weights_problems(key: str, folder: Path) -> Iterator[str]:
    """Yield what the files of weights lack: those that the index lists, or all if there is no index."""
    index, files = folder / WEIGHTS_INDEX, sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            files = [folder / name for name in listed_files(index)]
        except UserError as error:
            yield str(error)
            return
    missing = [file for file in files if not file.is_file()]
    if missing:
        yield (
            f"{key}={folder} lacks {len(missing)} of the {len(files)} files that {index.name} lists, such as "
            f"{missing[0].name}; complete the download"
        )
    damaged = [file for file in files if file not in missing and not _is_complete(file)]
    if damaged:
        yield (
            f"{key}={folder}: {len(damaged)} of the {len(files)} files of weights cannot be read or are not complete, "
            f"such as {damaged[0].name} with {damaged[0].stat().st_size:,} bytes; download them again (a file of about "
            "130 bytes is a pointer that `git lfs pull` replaces)"
        )


def _is_complete(file: Path) -> bool:
    """Return whether a file has the size that its header says. The tensors are not read."""
    try:
        with safe_open(file, "numpy"):
            return True
    except (SafetensorError, OSError):
        return False


def shape_problems(config: Config, architecture: Architecture, where: str) -> Iterator[str]:
    """Yield the broken rules that depend on the architecture; `where` names its source in messages."""
    size = config.rollout.tensor_parallel_size
    yield from engine_split_problems(architecture, where, "rollout.tensor_parallel_size", size)
    if not architecture.moe_layers:
        yield from _missing_expert_problems(config, where)
        yield from _missing_engine_expert_problems("rollout", config.rollout, where)
    else:
        yield from _quantized_expert_problems(config, architecture, where)
    yield from lora_shape_problems(config, architecture, where)
    yield from lora_transfer_problems(config, architecture)
    if architecture.family.attention_sinks:
        yield from policy_sink_problems(config, where)
        yield from engine_sink_problems(architecture, where, "rollout", config.rollout)
    if architecture.linear_layers:
        yield from policy_linear_problems(config, where)
        yield from engine_linear_problems(config, architecture, where, "rollout", config.rollout)
    yield from _trainer_shape_problems(config, config.parallel, architecture, where)


def teacher_shape_problems(
    config: Config, teacher: Architecture, where: str, policy: Architecture | None
) -> Iterator[str]:
    """Yield the broken rules that depend on the teacher's architecture; `where` names its source in messages."""
    if (engines := config.algorithm.teacher_engines) is not None:
        key, size = f"{TEACHER_ENGINES}.tensor_parallel_size", engines.tensor_parallel_size
        yield from engine_split_problems(teacher, where, key, size)
        if not teacher.moe_layers:
            yield from _missing_engine_expert_problems(TEACHER_ENGINES, engines, where)
        if teacher.family.attention_sinks:
            yield from engine_sink_problems(teacher, where, TEACHER_ENGINES, engines)
        if teacher.linear_layers:
            yield from engine_linear_problems(config, teacher, where, TEACHER_ENGINES, engines)
        yield from _length_problems(config, teacher, where)
    else:
        yield from _trainer_shape_problems(config, config.parallel.for_teacher, teacher, where)
    if policy is not None and teacher.vocab_size < policy.vocab_size:
        yield (
            f"{where}: vocab_size={teacher.vocab_size} of {TEACHER} must be at least the policy's {policy.vocab_size}, "
            "because the teacher scores the policy's tokens; choose a teacher with the policy's tokenizer"
        )


def _trainer_shape_problems(
    config: Config, parallel: ParallelConfig, architecture: Architecture, where: str
) -> Iterator[str]:
    """Yield the broken rules of a model that the trainer runs in a parallel layout."""
    tp = parallel.tensor_model_parallel_size
    yield from split_problems(architecture, where, "parallel.tensor_model_parallel_size", tp)
    yield from division_problems(architecture, parallel, where)
    if architecture.moe_layers:
        yield from _expert_problems(parallel, architecture, where)
    yield from transformer_engine_shape_problems(config, architecture, where)
    if architecture.family.attention_sinks:
        yield from trainer_sink_problems(config, parallel, where)
    if architecture.linear_layers:
        yield from trainer_linear_problems(config, parallel, architecture, where)
    if architecture.kv_lora_rank:
        yield from _latent_attention_problems(parallel, architecture, where)
    heads = architecture.num_attention_heads
    if heads % architecture.num_key_value_heads:
        yield (
            f"{where}: num_attention_heads={heads} must be a multiple of num_key_value_heads="
            f"{architecture.num_key_value_heads}, which they share; change one of them"
        )
    yield from _length_problems(config, architecture, where)


def _length_problems(config: Config, architecture: Architecture, where: str) -> Iterator[str]:
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    if prompt + response > architecture.context_length:
        yield (
            f"data.max_prompt_length={prompt} + rollout.max_response_length={response} = {prompt + response} tokens "
            f"must not exceed the model's {_context(architecture)} ({where}); shorten one of the two"
        )
    elif config.max_model_len > architecture.context_length:
        evaluated = config.evaluation.max_response_length
        yield (
            f"data.max_prompt_length={prompt} + evaluation.max_response_length={evaluated} = {config.max_model_len} "
            f"tokens must not exceed the model's {_context(architecture)} ({where}); shorten one of the two"
        )


def _latent_attention_problems(parallel: ParallelConfig, architecture: Architecture, where: str) -> Iterator[str]:
    tp = parallel.tensor_model_parallel_size
    if tp > 1 and not (architecture.moe_layers or parallel.sequence_parallel):  # experts have the same rule
        yield (
            f"parallel.tensor_model_parallel_size={tp} with latent attention ({where}) needs "
            "parallel.sequence_parallel=true, because Megatron sums the gradient of its shared key only then; set it"
        )
    widths = {"q_lora_rank": architecture.q_lora_rank, "kv_lora_rank + qk_rope_head_dim": architecture.cached_dim}
    for name, width in widths.items():
        if width % tp:
            yield (
                f"{where}: {name}={width} must be a multiple of parallel.tensor_model_parallel_size={tp}, by which "
                f"Megatron divides it; choose a size that divides {width}"
            )


def split_problems(architecture: Architecture, where: str, key: str, size: int) -> Iterator[str]:
    """Yield the rules that a tensor parallel size breaks; `key` is its configuration key.

    Megatron's and vLLM's layers are split in the same way.
    """
    names = ("num_attention_heads", *(("intermediate_size",) * architecture.has_dense_layers))
    for name in (*names, "shared_expert_intermediate_size"):
        value = getattr(architecture, name)
        if value % size:
            if name not in names and architecture.family.sigmoid_router:
                name = "n_shared_experts * moe_intermediate_size"
            yield (
                f"{where}: {name}={value} must be a multiple of {key}={size}, which splits it; choose a size that "
                f"divides {value}"
            )
    key_value_heads = architecture.num_key_value_heads
    if key_value_heads % size and size % key_value_heads:
        yield (
            f"{where}: num_key_value_heads={key_value_heads} must be a multiple or a divisor of {key}={size}, whose "
            "ranks share the heads; choose another size"
        )


def engine_split_problems(architecture: Architecture, where: str, key: str, size: int) -> Iterator[str]:
    """Yield the rules that an engine's tensor parallel size breaks; `key` is its configuration key."""
    yield from split_problems(architecture, where, key, size)
    padded = round_up(architecture.vocab_size, VLLM_VOCAB_MULTIPLE)
    if padded % size:
        yield (
            f"{where}: vocab_size={architecture.vocab_size}, which vLLM pads to {padded}, must be a multiple of "
            f"{key}={size}, which splits it; choose a size that divides {padded}"
        )


def _context(architecture: Architecture) -> str:
    if architecture.rope_scaling.get("rope_type") == "yarn":
        return f"original_max_position_embeddings x factor = {architecture.context_length} of its YaRN scaling"
    return f"max_position_embeddings={architecture.context_length}"


def _missing_expert_problems(config: Config, where: str) -> Iterator[str]:
    if config.algorithm.routing_replay != "none":
        yield (
            f"algorithm.routing_replay={config.algorithm.routing_replay} replays the choice of experts, but the "
            f"model has none ({where}); set it to none"
        )
    if config.model.freeze_router:
        yield f"model.freeze_router=true, but the model has no experts ({where}), and so no routers; remove it"
    if (ep := config.parallel.expert_model_parallel_size) > 1:
        yield (
            f"parallel.expert_model_parallel_size={ep} splits a layer's experts, but the model has none ({where}); "
            "set it to 1"
        )


def _missing_engine_expert_problems(section: str, engines: EngineSizeConfig, where: str) -> Iterator[str]:
    if engines.enable_expert_parallel:
        yield (
            f"{section}.enable_expert_parallel=true places whole experts on an engine's ranks, but the model has none "
            f"({where}); remove it"
        )


def _quantized_expert_problems(config: Config, architecture: Architecture, where: str) -> Iterator[str]:
    """Refuse transports that fill a GPU with unquantized experts, which vLLM 0.32 keeps if it pads them.

    Its loader waits for as many elements as the padded experts have (model_loader/reload/layerwise.py), so it keeps
    them until the update ends; `transport=store` gives it tensors in host memory.
    """
    rollout, transport, width = config.rollout, config.weight_sync.transport, architecture.moe_intermediate_size
    size = rollout.ranks_per_expert
    if rollout.quantization is not None and transport != "store" and width % (size * EXPERT_BLOCK):
        fits = size > 1 and width % EXPERT_BLOCK == 0
        yield (
            f"weight_sync.transport={transport} with rollout.quantization={rollout.quantization}: an engine rank has "
            f"{width // size} of an expert's {width} rows (moe_intermediate_size, {where}), which vLLM pads to a "
            f"multiple of {EXPERT_BLOCK}, and then keeps the unquantized experts of all layers in GPU memory until a "
            "weight update ends; set transport=store" + ", or rollout.enable_expert_parallel=true" * fits
        )


def _expert_problems(parallel: ParallelConfig, architecture: Architecture, where: str) -> Iterator[str]:
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or tp
    if ep == 1 and etp != tp:
        yield (
            f"parallel.expert_tensor_parallel_size={etp} with parallel.tensor_model_parallel_size={tp} and "
            "expert_model_parallel_size=1: Megatron reduces the gradients of experts over their own ranks only when "
            "expert_model_parallel_size exceeds 1; raise it, or remove expert_tensor_parallel_size"
        )
    if architecture.num_experts % ep:
        yield (
            f"{where}: {architecture.family.expert_field}={architecture.num_experts} must be a multiple of "
            f"parallel.expert_model_parallel_size={ep}, which splits them; choose a size that divides it"
        )
    if architecture.moe_intermediate_size % etp:
        yield (
            f"{where}: moe_intermediate_size={architecture.moe_intermediate_size} must be a multiple of "
            f"parallel.expert_tensor_parallel_size={etp}, which splits it; choose a size that divides it"
        )
    if tp > 1 and not parallel.sequence_parallel:
        yield (
            f"parallel.tensor_model_parallel_size={tp} with experts ({where}) needs parallel.sequence_parallel=true, "
            "because Megatron trains experts on tokens that are split over the tensor-parallel ranks; set it"
        )
