"""Lists the packages of a base that a container engine makes, in that base itself. Standard library only.

The argument is a file with the rest of the list as JSON; the whole goes to standard output. dpkg knows no
digests of the archives that it unpacked, so the entries have none.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

_FORMAT = "${db:Status-Status}\t${Package}\t${Version}\t${Architecture}\n"


def main() -> None:
    """Print the list."""
    command = ["dpkg-query", "--show", "--showformat", _FORMAT]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    rows = sorted(line.split("\t") for line in done.stdout.decode("ascii").splitlines())
    value = json.loads(Path(sys.argv[1]).read_bytes())
    value["debian"] = [
        {"name": name, "version": version, "architecture": architecture, "file": "", "sha256": ""}
        for status, name, version, architecture in rows
        if status == "installed"  # of a removed package its settings may be left
    ]
    value["distribution"] = platform.freedesktop_os_release()["ID"]
    json.dump(value, sys.stdout, sort_keys=True, separators=(",", ":"))


if __name__ == "__main__":
    main()
