"""Asks transformers what it would make of the weights in a folder: `python -m appliance.preflight.weights_child FOLDER
TRUST_REMOTE_CODE`, the last `True` or `False`. It says a Loading.

A process of its own: torch and transformers take seconds to load, and a model may bring code.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from appliance.quant.loading import ask_transformers
from appliance.tasks.user_code import voice


def main() -> int:
    folder, trust_remote_code = sys.argv[1], sys.argv[2] == "True"
    say = voice()
    say("loading", asdict(ask_transformers(Path(folder), trust_remote_code=trust_remote_code)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
