"""Writes the profile of what was in FlashRL's file: `python -m appliance.profile.take_over SCALES SOURCE FOLDER`.

Problems are lines on stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path

from appliance.errors import ApplianceError
from appliance.quant.donor import from_flashrl
from appliance.quant.profile import write_profile


def main(arguments: list[str]) -> int:
    scales, source, folder = arguments
    try:
        write_profile(from_flashrl(Path(scales), source=source), folder=Path(folder))
    except ApplianceError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
