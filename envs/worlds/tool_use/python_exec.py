"""The tool `python_exec`: a program of the policy's, run in the sandbox, answered with what it printed."""

from collections.abc import Callable

from nanoskyrl.envs.sandbox.base import Limits, PythonSession, Ran, run_python
from nanoskyrl.envs.tools import ToolError

LIMITS = Limits(seconds=5.0, memory_mb=256, output_bytes=16384)
MAX_OUTPUT_LENGTH = 4000
"""Characters of output that the policy sees; the middle of more is left out."""
REASONS = {
    "timeout": f"the program was stopped after {LIMITS.seconds:g} s",
    "memory": f"the program wanted more than {LIMITS.memory_mb} MB of memory",
    "output": f"the program printed more than {LIMITS.output_bytes} bytes",
    "killed": "the program was killed",
}


def make_python_exec(
    backend: str = "auto", files: dict[str, bytes] | None = None, *, session: bool = False
) -> Callable[[str], str]:
    """Return the tool for one episode.

    Args:
        backend: A sandbox of `envs/sandbox/base.py`.
        files: What lies in the directory where programs start.
        session: Whether a program continues from the names of the one before; `monty` alone can.
    """
    kept = PythonSession(LIMITS, files) if session else None

    def python_exec(code: str) -> str:
        """Run a Python program and return what it prints."""
        ran = kept.run(code) if kept else run_python(code, files=files, limits=LIMITS, backend=backend)
        return shown(ran)

    return python_exec


def shown(ran: Ran) -> str:
    """Return what the policy reads of a run.

    Raises:
        ToolError: the program failed; the text says how, with what it had printed until then.
    """
    if ran.ok:
        return _short(ran.stdout.rstrip("\n")) or "the program printed nothing; print what you want to see"
    what = REASONS.get(ran.reason or "") or ran.stderr.strip() or "the program ended with a status other than 0"
    raise ToolError(_short(f"{ran.stdout.rstrip()}\n{what}".strip()))


def _short(text: str) -> str:
    if len(text) <= MAX_OUTPUT_LENGTH:
        return text
    half = MAX_OUTPUT_LENGTH // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


python_exec = make_python_exec()
