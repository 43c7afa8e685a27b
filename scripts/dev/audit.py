"""Check pinned and locked packages for known vulnerabilities, with pip-audit.

Exit status 1 if a vulnerability has a fixed version and is not in ACCEPTED; 0 with a note if the
index provides no advisories. Queries torch first, to detect such an index with one request.

    python scripts/dev/audit.py
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "requirements.txt", ROOT / "scripts/locks/requirements-dev.lock"]
SECONDS = 5                                        # timeout of a request
SECONDS_IN_ALL = 120
ACCEPTED = {}                                      # advisory id -> why it does not apply


class NoAdvisoriesError(Exception):
    """The index cannot be reached, or provides no advisories."""


def ask(files: list[Path]) -> list[dict]:
    """pip-audit's dependencies: name, version and vulns, or name and skip_reason."""
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--format", "json",
               "--progress-spinner", "off", "--timeout", str(SECONDS)]
    for file in files:
        command += ["--requirement", str(file)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_IN_ALL)
    except subprocess.TimeoutExpired:
        raise NoAdvisoriesError(f"no answer in {SECONDS_IN_ALL} seconds") from None
    try:
        return json.loads(process.stdout)["dependencies"]
    except ValueError:
        lines = process.stderr.strip().splitlines() or ["no output"]
        raise NoAdvisoriesError(f"pip-audit: {lines[-1][:200]}") from None


def ask_all() -> list[dict]:
    torch = next(line for line in FILES[0].read_text().splitlines() if line.startswith("torch=="))
    with tempfile.TemporaryDirectory() as directory:
        probe = Path(directory) / "probe.txt"
        probe.write_text(torch + "\n")
        first = ask([probe])
    if any("skip_reason" in dependency for dependency in first):
        raise NoAdvisoriesError(first[0]["skip_reason"])
    return ask(FILES)


def findings(dependencies: list[dict]) -> list[tuple[str, bool]]:
    """-> (line, needs a fix): a fixed version exists and it is not in ACCEPTED."""
    lines = []
    for dependency in dependencies:
        for vuln in dependency.get("vulns", ()):
            names = {vuln["id"], *vuln.get("aliases", ())}
            accepted = next((ACCEPTED[name] for name in names if name in ACCEPTED), None)
            fixed = ", ".join(vuln["fix_versions"])
            remedy = f"fixed in {fixed or 'no version yet'}"
            if accepted:
                remedy = f"accepted: {accepted}"
            lines.append((f"{dependency['name']} {dependency['version']}: {vuln['id']}, {remedy}",
                          bool(fixed) and not accepted))
    return lines


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    try:
        dependencies = ask_all()
    except NoAdvisoriesError as e:
        print(f"Vulnerabilities: not scanned, the package index provides no advisories ({e})")
        return 0
    lines = findings(dependencies)
    for line, _ in lines:
        print(line)
    skipped = [dependency["name"] for dependency in dependencies if "skip_reason" in dependency]
    if skipped:
        print(f"Unknown to the index: {', '.join(skipped)}")
    bad = sum(needs_fix for _, needs_fix in lines)
    print(f"Vulnerabilities: {len(dependencies) - len(skipped)} packages scanned, {len(lines)} "
          f"found, {bad} to fix")
    if bad:
        print("Raise the pin and run scripts/dev/lock.py, or add it to ACCEPTED in "
              "scripts/dev/audit.py with a reason", file=sys.stderr)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
