"""`ralbuild doctor`."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print what this machine has for each job; exit 7 when the main job cannot run."""
    from ralbuild.doctor import examine

    findings = examine()
    if options.json:
        print(json.dumps([{"name": f.name, "ok": f.ok, "needed": f.needed, "found": f.found, "hint": f.hint}
                          for f in findings], indent=2))  # fmt: skip
    else:
        for finding in findings:
            mark = "ok  " if finding.ok else "MISS" if finding.needed else "none"
            print(f"{mark} {finding.name:<18} {finding.found}")
            if not finding.ok and finding.hint:
                print(f"     {'':<18} {finding.hint}")
    return 7 if any(f.needed and not f.ok for f in findings) else 0
