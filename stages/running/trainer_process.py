"""`skyrl train --follow` as a child of the loop: started on its GPUs, watched, stopped."""

import os
import subprocess
import sys
import time
from pathlib import Path

from nanoskyrl.stages.core.children import drop_directory, ending_with_us, kept_directory, stop_process
from nanoskyrl.stages.core.errors import EngineError
from nanoskyrl.stages.core.gpus import visible
from nanoskyrl.stages.core.manifest import is_finished
from nanoskyrl.stages.core.storage import make_directory, mirror_of
from nanoskyrl.stages.running.run_settings import as_toml
from nanoskyrl.stages.running.session import Session
from nanoskyrl.stages.running.standing_trainer import LOOP_PID, STOP_FILE

LOG = "train.log"
LOOK_SECONDS = 0.05
STOP_SECONDS = 30.0
LAST_WORDS, SHOWN = 1 << 15, 300
"""Bytes of the log that are looked through, and characters of its error that are shown."""


class TrainerProcess:
    """The trainer of a run."""

    def __init__(self, session: Session, gpus: tuple[int, ...], steps: int, keep_states: int) -> None:
        """Say what is to be started.

        Args:
            session: Of the run.
            gpus: Where it trains, one process on each; none: one process on the CPU.
            steps: Policies to train, counted from the beginning of the run.
            keep_states: Optimizer states that it keeps.
        """
        self.run, self.gpus = session.run, gpus
        self._settings = as_toml(session.settings)
        self._arguments = ["--steps", str(steps), "--set", f"loop.keep_states={keep_states}"]
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None

    @property
    def log(self) -> Path:
        """Where it writes what it has to say."""
        return mirror_of(self.run.root) / "logs" / LOG

    def start(self) -> None:
        """Start it."""
        make_directory(self.log.parent)
        (self.run.root / STOP_FILE).unlink(missing_ok=True)
        self._scratch = kept_directory("nanoskyrl-")
        settings = self._scratch / "settings.toml"
        settings.write_text(self._settings, encoding="utf-8")
        command = [
            sys.executable, "-m", "nanoskyrl_cli.main", "train", "--follow", "--run", str(self.run.root),
            "--config", str(settings), "--num-processes", str(max(1, len(self.gpus))), *self._arguments,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            place = {"CUDA_VISIBLE_DEVICES": visible(self.gpus), LOOP_PID: str(os.getpid())}
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=ending_with_us({**os.environ, **place}),
            )  # fmt: skip

    def wait_for(self, step: int) -> None:
        """Wait until a step is trained.

        Raises:
            EngineError: the trainer ended without it.
        """
        assert self._process is not None
        place = self.run.stage(step, "train")
        while not is_finished(place):
            if self._process.poll() is not None and not is_finished(place):
                raise EngineError(
                    f"the trainer ended with {self._process.returncode} before step {step} was trained: "
                    f"{self._last_words()}",
                    hint=f"The log is `{self.log}`",
                )
            time.sleep(LOOK_SECONDS)

    def _last_words(self) -> str:
        text = self.log.read_bytes()[-LAST_WORDS:].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        found = next((line for line in reversed(lines) if line.startswith("error:")), lines[-1] if lines else "no word")
        return found[:SHOWN]

    def stop(self) -> None:
        """Ask it to stop, and see to it that it does."""
        if self._process is not None:
            stop_process(self._process, STOP_SECONDS)
        if self._scratch is not None:
            drop_directory(self._scratch)
