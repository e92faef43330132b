"""Count the statements of the package, docstrings and comments aside: now, and at other commits.

python benchmarks/statements.py [COMMIT ...]
"""

import ast
import io
import subprocess
import sys
import tarfile
from pathlib import Path

FOLDERS = ("stages", "envs", "algos", "eval", "nanoskyrl_cli")
ROOT = Path(__file__).parent.parent


def statements(source: bytes) -> int:
    """Return how many statements a module has."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    texts = [n for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    return len(nodes) - len(texts)


def at(commit: str) -> int:
    """Return how many the package had at a commit."""
    archive = subprocess.run(["git", "archive", commit, *FOLDERS], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        sources = [files.extractfile(file) for file in files if file.name.endswith(".py")]
        return sum(statements(source.read()) for source in sources if source is not None)


if __name__ == "__main__":
    for commit in sys.argv[1:]:
        print(f"{commit}: {at(commit)}")
    now = [path.read_bytes() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    print(f"now: {sum(map(statements, now))}")
