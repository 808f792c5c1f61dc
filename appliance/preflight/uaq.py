"""Can UAQ scale a plan's model? Read without torch: the names in its files."""

from __future__ import annotations

import os.path
from pathlib import Path

from appliance.errors import EngineError
from appliance.plan.model import RunPlan
from appliance.quant.files import tensor_shapes
from appliance.quant.uaq_layers import MARK_FILE, norm_fed


def uaq_problem(plan: RunPlan) -> str:
    """Why `correction.uaq_scale` cannot be, empty where it can, or the model is not on this host yet."""
    folder = Path(plan.model.path)
    if plan.uaq is None or not os.path.isfile(folder / "config.json"):
        return ""
    if os.path.exists(folder / MARK_FILE):
        return f"{folder}: the model is scaled by UAQ already ({MARK_FILE} says so)"
    try:
        names = tensor_shapes(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{folder}: its safetensors cannot be read: {type(error).__name__}: {error}"
    if not names:
        return f"{folder}: UAQ reads weights from *.safetensors, and the folder has none"
    try:
        norm_fed(names)
    except EngineError as error:
        return f"{folder}: {error.message}"
    return ""
