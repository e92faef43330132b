"""A repository for an agent to work in: files of one commit in a directory of their own, tools inside the sandbox.

The copy has that commit and no history: the fix must not be found in a later one. Every
command, the edits and the taking of the diff run in the sandbox; what the agent leaves in
`.git` is read by no git outside.
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanoskyrl.envs.actions import tool_calls
from nanoskyrl.envs.base import Observation, Step, Task
from nanoskyrl.envs.sandbox.base import Limits, Ran, full_python, run_command
from nanoskyrl.envs.tools import Tool, ToolError, carry_out_all
from nanoskyrl.eval.benchmarks.patches import commit_of, tidy
from nanoskyrl.stages.core.children import drop_directory, ending_with_us, kept_directory
from nanoskyrl.stages.core.errors import InputError

LIMITS = Limits(seconds=60.0, memory_mb=2048, output_bytes=1 << 20, processes=64, file_mb=256)
SHOWN = 8000
"""Characters of a command's output that the agent sees: the beginning and the end."""
QUIET = (
    "export GIT_CONFIG_NOSYSTEM=1 GIT_PAGER=cat PAGER=cat GIT_TERMINAL_PROMPT=0 PYTHONDONTWRITEBYTECODE=1 "
    "GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'\n"
)
"""The files belong to somebody else than whoever runs in the sandbox, which git has to be assured of."""
IDENTITY = ["-c", "user.name=agent", "-c", "user.email=agent@localhost", "-c", "commit.gpgsign=false"]
DIFF = (
    "git -c core.fsmonitor= add -A && "
    "git -c core.fsmonitor= diff --cached --binary --no-color --no-ext-diff --no-textconv HEAD"
)
EDIT = """
import json, pathlib, sys
order = json.loads(sys.stdin.read())
path = pathlib.Path(order["path"])
if not order["old"]:
    if path.exists():
        sys.exit("the file is there already; give the text that is to be replaced")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(order["new"], encoding="utf-8")
else:
    text = path.read_text(encoding="utf-8")
    count = text.count(order["old"])
    if count != 1:
        sys.exit(f"the old text stands {count} times in the file; it must stand there once")
    path.write_text(text.replace(order["old"], order["new"]), encoding="utf-8")
print("done")
"""
MAX_CALLS = 8
"""Carried out of one reply."""
SUBMIT = "submit"


def lay_out(repository: Path, commit: str, folder: Path) -> None:
    """Write the files of a commit into a directory, as the only commit of a new repository.

    Raises:
        InputError: the repository does not have the commit.
    """
    archive = subprocess.run(
        ["git", "-C", str(repository), "archive", "--format=tar", commit_of(commit)], capture_output=True, check=False,
        env=ending_with_us(),
    )  # fmt: skip
    if archive.returncode:
        raise InputError(
            f"`{repository}` has no commit {commit[:12]}: {archive.stderr.decode(errors='replace').strip()[:200]}",
            hint="Fetch it there",
        )
    subprocess.run(["tar", "-x", "-f", "-", "-C", str(folder)], input=archive.stdout, check=True, env=ending_with_us())
    for words in (["init", "-q"], ["add", "-A", "-f"], ["commit", "-q", "--allow-empty", "-m", "base"]):
        subprocess.run(["git", *IDENTITY, *words], cwd=folder, check=True, capture_output=True, env=ending_with_us())


class CheckoutEpisode:
    """Tools `bash`, `edit` and `submit` in a checkout; ends with `submit`, or a reply without a call."""

    def __init__(self, repository: Path, commit: str) -> None:
        """Nothing is copied until `reset`."""
        self.repository, self.commit = repository, commit
        self._folder: Path | None = None
        self.tools = {name: Tool(name, function) for name, function in self._functions().items()}

    def reset(self, task: Task, seed: int) -> Observation:
        """Copy the repository and pose the issue."""
        full_python()
        self._folder = kept_directory("skyrl-checkout-")
        lay_out(self.repository, self.commit, self._folder)
        return Observation(
            messages=task.messages,
            tools=[tool.schema for tool in self.tools.values()],
            metadata={"ground_truth": task.ground_truth, **task.metadata, "model_patch": ""},
        )

    def step(self, action: str) -> Step:
        """Carry out the calls; every step notes what the patch is by now, for turns may run out."""
        written = tool_calls(action)
        if not written:
            return Step(done=True, metadata={"model_patch": self.patch()})
        # What stands behind `submit` is not done any more.
        end = next((place for place, call in enumerate(written, 1) if call.tool == SUBMIT), len(written))
        calls, replies = carry_out_all(written[:end], self.tools, MAX_CALLS)
        done = any(call.tool == SUBMIT and call.ok for call in calls)
        return Step(
            messages=() if done else replies, done=done, tool_calls=calls, metadata={"model_patch": self.patch()}
        )

    def close(self) -> None:
        """Delete the copy."""
        if self._folder is not None:
            drop_directory(self._folder)
            self._folder = None

    def patch(self) -> str:
        """Return what was changed so far; nothing where no diff can be taken."""
        ran = self._run(["bash", "-c", QUIET + DIFF])
        return tidy(ran.stdout) if ran.ok else ""

    def _run(self, argv: Sequence[str], stdin: str = "") -> Ran:
        assert self._folder is not None
        return run_command(argv, directory=self._folder, stdin=stdin, limits=LIMITS)

    def _functions(self) -> dict[str, Any]:
        def bash(command: str) -> str:
            """Run a shell command in the repository and see what it prints."""
            ran = self._run(["bash", "-c", QUIET + command])
            text = clipped("\n".join(part for part in (ran.stdout.rstrip(), ran.stderr.rstrip()) if part))
            if ran.reason in (None, "error"):
                return text + ("" if ran.ok else "\n[the command failed]")
            raise ToolError(f"stopped ({ran.reason})\n{text}")

        def edit(path: str, old: str, new: str) -> str:
            """Replace a text that stands once in a file by another; an empty old text makes a new file."""
            ran = self._run(["python3", "-c", EDIT], json.dumps({"path": path, "old": old, "new": new}))
            if not ran.ok:
                raise ToolError(ran.stderr.strip().split("\n")[-1] or f"stopped ({ran.reason})")
            return ran.stdout.strip()

        def submit() -> str:
            """End: the repository as it is now is the answer."""
            return "submitted"

        return {"bash": bash, "edit": edit, SUBMIT: submit}


def clipped(text: str) -> str:
    """Return a text of a length that an agent can read, its middle left out."""
    half = SHOWN // 2
    return text if len(text) <= SHOWN else f"{text[:half]}\n[{len(text) - SHOWN} characters left out]\n{text[-half:]}"
