"""Puts a bundle together: `python3 put_together.py FOLDER`, beside its parts. Any Python from 3.9, nothing else.

Python and glibc of this host are checked first, and every part before anything is unpacked. FOLDER is new; it holds the
project, `site/` with the packages, and `accept.sh`, which runs `appliance accept` with both and with this Python.
"""

import hashlib
import io
import json
import os
import pathlib
import sys
import tarfile

LIST = "parts.json"


class Refused(Exception):
    """What is wrong, and what to do."""


class Parts(io.RawIOBase):
    """The parts as one file, read from the first to the last."""

    def __init__(self, files):
        self._files = list(files)
        self._open = None

    def readable(self):
        return True

    def readinto(self, into):
        while self._open is not None or self._files:
            if self._open is None:
                self._open = self._files.pop(0).open("rb")
            read = self._open.readinto(into)
            if read:
                return read
            self._open.close()
            self._open = None
        return 0


def glibc_version():
    """Such as (2, 36), (0, 0) where the C library is another one."""
    try:
        name, _, version = os.confstr("CS_GNU_LIBC_VERSION").partition(" ")
    except (AttributeError, OSError, ValueError):
        return (0, 0)
    return tuple(int(each) for each in version.split(".")[:2]) if name == "glibc" else (0, 0)


def misfits(needs):
    """Return the reasons why this host cannot run what was packed."""
    python = ".".join(map(str, sys.version_info[:2]))
    if needs["python"] not in ("", python):
        yield (
            f"this is Python {python}, the bundle is for {needs['python']}; run it with python{needs['python']}, or "
            f'pack again: make bundle ARGS="--python {python}"'
        )
    needed, there = tuple(needs["glibc"]), glibc_version()
    if there < needed:
        has = "glibc {}.{}".format(*there) if any(there) else "no glibc"
        of = needs["glibc_of"]
        yield "this host has {}, {} needs {}.{}; use a newer host or an image".format(has, of, *needed)


def check(folder):
    """The parts in their order. Raises Refused with everything that is wrong."""
    try:
        content = json.loads((folder / LIST).read_text())
        listed, problems = content["parts"], list(misfits(content))
    except (OSError, ValueError, KeyError) as error:
        raise Refused(f"{folder / LIST} cannot be read: {error}; copy it again") from error
    if problems:
        raise Refused("\n".join(problems))
    for part in listed:
        file = folder / part["name"]
        if not file.is_file():
            problems.append(f"{part['name']} is missing; copy it beside {LIST}")
        elif file.stat().st_size != part["bytes"]:
            problems.append(f"{part['name']} has {file.stat().st_size} bytes of {part['bytes']}; copy it again")
        elif digest_of(file) != part["sha256"]:
            problems.append(f"{part['name']} is not what was packed, its sha256 is another one; copy it again")
    if problems:
        raise Refused("\n".join(problems))
    return [folder / part["name"] for part in listed]


def digest_of(file):
    state = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def put_together(folder, target):
    """Raises Refused; until all is unpacked, `target` is not there."""
    parts = check(folder)
    if target.exists():
        raise Refused(f"{target} is there already; name a new folder")
    partial = target.with_name(target.name + ".partial")
    if partial.exists():
        raise Refused(f"{partial} is there, of a try that was cut short; remove it")
    partial.mkdir(parents=True)
    safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with io.BufferedReader(Parts(parts), 1 << 20) as stream, tarfile.open(fileobj=stream, mode="r|xz") as archive:
        archive.extractall(partial, **safe)
    (partial / "python").write_bytes(os.fsencode(sys.executable))
    partial.rename(target)


def main():
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python3 put_together.py FOLDER\n")
        return 2
    target = pathlib.Path(sys.argv[1]).absolute()
    try:
        put_together(pathlib.Path(__file__).resolve().parent, target)
    except Refused as refused:
        sys.stderr.write("".join(f"error: {line}\n" for line in str(refused).splitlines()))
        return 3
    sys.stdout.write(f"{target}/accept.sh\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
