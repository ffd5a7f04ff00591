"""The models that a run scores with but does not train: the reference model and the teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_bapo.model.build import PolicyModel
from megatron_bapo.model.hf_export import save_hugging_face
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.trainer.worker import Worker, create_reference, create_teacher


@dataclass(frozen=True)
class FrozenModels:
    """This rank's shards of the frozen models."""

    reference: PolicyModel | None = None
    """None unless the KL penalty needs it."""
    teacher: PolicyModel | None = None
    """None without `algorithm.distillation`, and if engines serve the teacher."""

    @property
    def models(self) -> list[PolicyModel]:
        """The models that the run has."""
        return [model for model in (self.reference, self.teacher) if model is not None]


def load_frozen_models(
    worker: Worker, directory: RunDirectory, announce: Callable[[str], None], *, is_new: bool
) -> FrozenModels:
    """Load the models that the configuration asks for.

    The reference model has the weights at the first step. Others than those of the model's folder are written to the
    run directory by a new run, so that a resumed run can load them. New adapters that are off need no copy. Collective.
    """
    config, reference, teacher = worker.config, None, None
    if config.algorithm.needs_reference and not config.has_reference_copy:
        reference = worker.model.without_adapters()
    elif config.algorithm.needs_reference:
        announce("loading the reference model")
        path = config.model_path
        if config.has_new_weights:
            path = directory.reference
            if is_new:
                save_hugging_face(worker.model, worker.groups, config.model_path, path)
        reference = create_reference(config, path, worker.groups)
    if config.algorithm.trainer_holds_teacher:
        announce("loading the teacher")
        teacher = create_teacher(config, worker.groups)
    return FrozenModels(reference, teacher)
