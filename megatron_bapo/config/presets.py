"""Presets of the clip bounds search, from the paper and from the authors' released code."""

from __future__ import annotations

from typing import Any, Final, Literal

ClipBoundsPreset = Literal["paper", "released_code", "octothinker"]

CLIP_BOUNDS_PRESETS: Final[dict[ClipBoundsPreset, dict[str, Any]]] = {
    # The defaults of ClipBoundsSettings.
    "paper": {},
    # bapo_trainer.yaml of the authors' repository, whose adv_ratio_target=1 is a share of 0.5. Their example script
    # narrows the lower range to [0.8, 0.95], doubles the upper step and has a target ratio of 0.5, a share of 1/3.
    "released_code": {
        "positive_contribution_target": 0.5,
        "ratio_lower_max": 0.8,
        "ratio_lower_step": 0.05,
        "ratio_upper_max": 2.0,
        "search_order": "lower_first",
        "target_measure": "ratio",
        "scope": "microbatch",
    },
    # The paper's settings for OctoThinker (Llama).
    "octothinker": {
        "positive_contribution_target": 0.45,
        "ratio_lower_start": 0.8,
        "ratio_upper_max": 2.0,
    },
}
