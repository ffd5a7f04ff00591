"""Run by torchrun: loads a Hugging Face checkpoint into a layout, and writes it back.

Arguments: checkpoint, output folder, the configuration's `parallel` section as JSON.
"""

import json
import sys
from pathlib import Path

from examples import make_config
from torch import distributed as dist

from megatron_bapo.model.build import build_policy
from megatron_bapo.model.hf_export import save_hugging_face
from megatron_bapo.model.hf_import import load_hugging_face
from megatron_bapo.parallel.groups import create_groups
from megatron_bapo.parallel.platform import start_distributed


def main() -> None:
    source, target, parallel = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    start_distributed(timeout_s=120)
    config = make_config(source, target, parallel, "float32", packing=True)
    groups = create_groups(config.parallel, seed=0, timeout_s=120)
    model = build_policy(config, source, groups)
    load_hugging_face(model, source, groups)
    save_hugging_face(model, groups, source, target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
