"""What the run may not touch, or lacks the word for: folders of others, unreadable files, ports in use, secrets. And
the token of our own Rays, which is made and checked here."""

from __future__ import annotations

import netrc
import os
import secrets
import socket
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from appliance.errors import PreflightError
from appliance.finding import Finding, error, warning
from appliance.plan.host import Ports
from appliance.preflight.container import is_mounted_secret
from appliance.preflight.disk import nearest_existing
from appliance.record.plan import RunPlan
from appliance.terms.environment import WANDB_KEY_VARIABLE, WANDB_MODE_VARIABLE

WANDB = "wandb"
_DEFAULT_URL = "https://api.wandb.ai"
_URL_VARIABLE = "WANDB_BASE_URL"  # of one's own server
_TOKEN_FILE_VARIABLE = "WANDB_IDENTITY_TOKEN_FILE"
_CONFIG_VARIABLE = "WANDB_CONFIG_DIR"
_NEEDS_NO_KEY = ("offline", "disabled")
_CONNECT_WITHIN_S = 3.0
_SHORTEST_TOKEN = 16


@dataclass(frozen=True)
class AccessFacts:
    cache_problem: str = ""
    """Reason why nothing can be made in the cache, or empty."""
    unreadable: tuple[str, ...] = ()
    """Files of the model that this user cannot read."""
    ports_in_use: tuple[int, ...] = ()
    """Ports of the head of a cluster that are in use on this host."""
    head_problem: str = ""
    """Reason why `cluster.address` does not answer, or empty."""
    token_problem: str = ""
    """Reason why the cluster's token cannot be used, or empty."""
    wandb_key: bool = True
    """Whether wandb has a key here, or needs none."""
    wandb_doubt: str = ""
    """Reason why it is not known whether wandb has a key, so that `wandb_key` counts for nothing; or empty."""
    uid: int = 0
    """User id of this process."""


def read_access(plan: RunPlan, *, ask_network: bool) -> AccessFacts:
    """Read the facts about access. ask_network: whether `cluster.address` may be tried, which can take seconds."""
    cluster = plan.cluster
    head = cluster.address if ask_network else None
    token_problem = ""
    if not cluster.has_own_ray:
        token_problem = _token_problem(Path(cluster.token_file), must_be=bool(cluster.address))
    has_head = not (cluster.has_own_ray or cluster.address)
    has_key, doubt = wandb_key() if WANDB in plan.logging.backends else (True, "")
    return AccessFacts(
        cache_problem=_write_problem(Path(plan.cache_dir)),
        unreadable=_unreadable(plan),
        ports_in_use=ports_in_use(Ports(cluster.port).of_the_head) if has_head else (),
        head_problem=head_problem(head) if head else "",
        token_problem=token_problem,
        wandb_key=has_key,
        wandb_doubt=doubt,
        uid=os.getuid(),
    )


def _write_problem(folder: Path) -> str:
    existing = nearest_existing(folder)
    if os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK):
        return ""
    return f"{existing} belongs to user {existing.stat().st_uid} and cannot be written"


def _unreadable(plan: RunPlan) -> tuple[str, ...]:
    """Return the model's folder, also one behind a folder that is closed to this user, or where it is open files in
    it."""
    folder = Path(plan.weights.name_or_path)
    if plan.weights.is_cached or not folder.is_absolute():
        return ()
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            return ()
    except OSError as error:
        return (str(folder),) if isinstance(error, PermissionError) else ()
    if not os.access(folder, os.R_OK | os.X_OK):
        return (str(folder),)
    files = sorted(each for each in folder.iterdir() if os.path.isfile(each))  # Path.is_file raises at a closed link
    return tuple(str(each) for each in files if not os.access(each, os.R_OK))


def ports_in_use(ports: Sequence[int]) -> tuple[int, ...]:
    return tuple(port for port in ports if not _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC: what lingers after a close is free
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True


def head_problem(address: str) -> str:
    """Describe why nothing answers at `host:port`; empty where something does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_WITHIN_S).close()
    except (OSError, OverflowError, UnicodeError) as error:  # the last one of a name that DNS cannot have
        return f"{address} does not answer ({error})"
    return ""


def _token_problem(file: Path, *, must_be: bool) -> str:
    """Judge the token as `train` will. A head makes its own; for a cluster that is there already, it must be here."""
    try:
        check_token(file)
    except PreflightError as error:
        is_made = not must_be and isinstance(error.__cause__, FileNotFoundError)
        return "" if is_made else error.message
    return ""


def judge_access(facts: AccessFacts) -> Iterator[Finding]:
    if facts.cache_problem:
        remedy = f"as its owner: chown -R {facts.uid} the folder; or set cluster.run_dir to one of yours"
        yield error("cache-owner", "cluster.run_dir", facts.cache_problem, remedy)
    if facts.unreadable:
        more = f" and {len(facts.unreadable) - 1} more" if len(facts.unreadable) > 1 else ""
        message = f"user {facts.uid} cannot read {facts.unreadable[0]}{more}"
        yield error("model-unreadable", "model.path", message, "let its owner chmod it")
    if facts.ports_in_use:
        ports = ", ".join(map(str, facts.ports_in_use))
        message = f"in use on this host: {ports}"
        yield error("port", "cluster.port", message, "end what listens there, or set cluster.port to another range")
    if facts.head_problem:
        yield error("no-head", "cluster.address", facts.head_problem, "start Ray there, or leave cluster.address out")
    if facts.token_problem:
        remedy = "copy that cluster's token file there, readable by you alone; a cluster of this host makes its own"
        yield error("token", "cluster.token_file", facts.token_problem, remedy)
    remedy = f"set {WANDB_KEY_VARIABLE}, or run `wandb login`, or set {WANDB_MODE_VARIABLE}=offline"
    if facts.wandb_doubt:
        message = f"cannot tell whether `wandb` has a key here: {facts.wandb_doubt}"
        yield warning("secret", "logging.backends", message, remedy)
    elif not facts.wandb_key:
        message = "`wandb` has no key here, and would ask for one in the middle of the start"
        yield error("secret", "logging.backends", message, remedy)


def wandb_key() -> tuple[bool, str]:
    """Return (whether wandb has a key or needs none, why that is not known). False and no reason means that there is
    none."""
    if os.environ.get(WANDB_MODE_VARIABLE) in _NEEDS_NO_KEY:
        return True, ""
    if os.environ.get(WANDB_KEY_VARIABLE) or os.environ.get(_TOKEN_FILE_VARIABLE):
        return True, ""
    settings = Path(os.environ.get(_CONFIG_VARIABLE) or "~/.config/wandb").expanduser() / "settings"
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
    """Find the netrc file as wandb does: NETRC, ~/.netrc, ~/_netrc."""
    if named := os.environ.get("NETRC"):
        return Path(named).expanduser()
    usual, other = Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()
    return other if os.path.exists(other) and not os.path.exists(usual) else usual


# The secret that a Ray of ours asks for: in a file that only its owner reads, never on a command line or in a log


def make_token(file: Path) -> None:
    """Write a new token into `file`, readable by its owner only; one that is there stays. Raises PreflightError as
    `check_token` does, and when it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            check_token(file)
            return
        write_token(file)
    except OSError as error:
        raise PreflightError(
            f"{file}: {error.strerror}", hint="set cluster.token_file to a place that you can write to"
        ) from error


def write_token(file: Path) -> None:
    """Write a new token into a new file, readable by its owner only. Raises OSError, also where something is there."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(secrets.token_hex(32) + "\n")


def check_token(file: Path) -> None:
    """Check a token file. Raises PreflightError when there is no token, when the text is no token, or when others may
    read it."""
    try:
        text, mode = file.read_text().strip(), stat.S_IMODE(file.stat().st_mode)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise PreflightError(
            f"{file}: {reason}", hint="copy the head's token file here, or give it with --token-file"
        ) from error
    if len(text) < _SHORTEST_TOKEN or not text.isprintable() or len(text.split()) != 1:
        raise PreflightError(
            f"{file}: a token is one word of {_SHORTEST_TOKEN} characters or more",
            hint="remove the file: the head makes one",
        )
    if mode & 0o077 and not is_mounted_secret(file):
        raise PreflightError(f"{file}: others may read it (mode {mode:04o})", hint=f"chmod 600 {file}")
