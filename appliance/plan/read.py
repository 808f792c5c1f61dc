"""A plan read back from `plan.json`, in every process of a run. Standard library only, as plan/model.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from appliance.corrections.registry import CorrectionMethod
from appliance.guard.policy import Action
from appliance.plan.model import (
    SCHEMA_VERSION,
    AlgorithmPlan,
    CheckpointPlan,
    Choice,
    ClusterPlan,
    CorrectionPlan,
    ExpectedAttestation,
    GuardPlan,
    ModelPlan,
    ProfilePlan,
    RolloutPlan,
    RunPlan,
    ShadowPlan,
    Switching,
    TaskPlan,
    TrainerPlan,
    UaqPlan,
)
from appliance.quant.scheme import Scheme
from appliance.quant.settings import quantisation_from_config


def read_plan(path: Path) -> RunPlan:
    """Read `plan.json`. Raises ValueError on another schema_version, OSError when the file cannot be read."""
    return plan_from_dict(json.loads(path.read_text()))


def plan_from_dict(raw: dict[str, Any]) -> RunPlan:
    if raw.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"plan has schema_version {raw.get('schema_version')!r}, this program reads {SCHEMA_VERSION}")
    rollout, profile = raw["rollout"], raw["profile"]
    return RunPlan(
        **{
            **raw,
            "model": ModelPlan(**raw["model"]),
            "task": TaskPlan(**raw["task"]),
            "rollout": RolloutPlan(
                **{
                    **rollout,
                    "scheme": Scheme(rollout["scheme"]),
                    "replicas": tuple(quantisation_from_config(each) for each in rollout["replicas"]),
                }
            ),
            "profile": _profile(profile) if profile else None,
            "correction": _correction(raw["correction"]),
            "guard": _guard(raw["guard"]),
            "uaq": UaqPlan(**raw["uaq"]) if raw["uaq"] else None,
            "cluster": ClusterPlan(**raw["cluster"]) if raw["cluster"] else None,
            "checkpoint": CheckpointPlan(**raw["checkpoint"]),
            "algorithm": AlgorithmPlan(**raw["algorithm"]),
            "trainer": TrainerPlan(**raw["trainer"]),
            "logging_backends": tuple(raw["logging_backends"]),
            "argv": tuple(raw["argv"]),
            "env": tuple((k, v) for k, v in raw["env"]),
            "pins": tuple((k, v) for k, v in raw["pins"]),
            "choices": tuple(Choice(**c) for c in raw["choices"]),
            "attestations": tuple(
                ExpectedAttestation(**{**a, "scheme": Scheme(a["scheme"]), "patches": tuple(a["patches"])})
                for a in raw["attestations"]
            ),
        }
    )


def _correction(raw: dict[str, Any]) -> CorrectionPlan:
    bounds, shadow = raw["bounds"], raw["shadow"]
    return CorrectionPlan(
        method=CorrectionMethod(raw["method"]),
        cap=raw["cap"],
        bounds=tuple(bounds) if bounds else None,
        clip_high=raw["clip_high"],
        clip_low=raw["clip_low"],
        shadow=ShadowPlan(**shadow) if shadow else None,
    )


def _guard(raw: dict[str, Any]) -> GuardPlan:
    changed = {"actions": tuple(Action(each) for each in raw["actions"]), "switching": Switching(raw["switching"])}
    return GuardPlan(**{**raw, **changed})


def _profile(raw: dict[str, Any]) -> ProfilePlan:
    return ProfilePlan(**{**raw, "scheme": Scheme(raw["scheme"]), "ignore": tuple(raw["ignore"])})
