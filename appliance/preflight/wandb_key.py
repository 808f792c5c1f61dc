"""Whether wandb would find a key here, as its own login looks for one: variables, then a netrc file for its host.

Nothing of wandb is imported, no key is kept, and none is shown.
"""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

from appliance.plan.env import WANDB_KEY_VARIABLE, WANDB_MODE_VARIABLE

_DEFAULT_URL = "https://api.wandb.ai"
_URL_VARIABLE = "WANDB_BASE_URL"  # of one's own server
_TOKEN_FILE_VARIABLE = "WANDB_IDENTITY_TOKEN_FILE"
_CONFIG_VARIABLE = "WANDB_CONFIG_DIR"
_NEEDS_NONE = ("offline", "disabled")


def wandb_key() -> tuple[bool, str]:
    """(whether there is one or none is needed, why that cannot be told). Without a doubt False means: there is none."""
    if os.environ.get(WANDB_MODE_VARIABLE) in _NEEDS_NONE:
        return True, ""
    if os.environ.get(WANDB_KEY_VARIABLE) or os.environ.get(_TOKEN_FILE_VARIABLE):
        return True, ""
    settings = _settings_file()
    try:
        host = urlsplit(os.environ.get(_URL_VARIABLE) or _DEFAULT_URL).netloc
        if not host:
            return False, f"{_URL_VARIABLE} is no address"
        file = _netrc_file()
        has = os.path.exists(file) and netrc.netrc(file).authenticators(host) is not None
    except netrc.NetrcParseError as error:
        return False, f"{error.filename}, line {error.lineno}, cannot be read"  # its text can quote a password
    except OSError as error:
        return False, f"{error.filename}: {error.strerror}"
    except ValueError:  # of an address, or of bytes that are not text
        return False, f"{_URL_VARIABLE} or the netrc file cannot be read"
    if not has and os.path.exists(settings):
        return False, f"{settings} may name another server, or hold a key"
    return has, ""


def _netrc_file() -> Path:
    """As wandb takes it: NETRC, ~/.netrc, ~/_netrc."""
    if named := os.environ.get("NETRC"):
        return Path(named).expanduser()
    usual, other = Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()
    return other if os.path.exists(other) and not os.path.exists(usual) else usual


def _settings_file() -> Path:
    return Path(os.environ.get(_CONFIG_VARIABLE) or "~/.config/wandb").expanduser() / "settings"
