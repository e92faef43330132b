"""A real OpenEnv server for tests: `APP` offers /guess and /move."""

import threading

from fastapi import FastAPI
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

OVER = threading.Event()
"""Set when no test waits any longer."""


class Guess(Action):
    text: str


class Move(Action):
    x: int
    y: int = 0


class Seen(Observation):
    text: str


class Spot(Observation):
    at: list[int]
    note: str = ""


class GuessEnvironment(Environment):
    """Say the secret: the seed's last digit. `crash` raises, `hang` waits, three turns are too many."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, split=None, index=None, **kwargs):
        self.secret, self.steps = str((seed if seed is not None else index or 0) % 10), 0
        return Seen(text=f"say a digit ({split or 'seed'})")

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        if action.text == "crash":
            raise ValueError("the world broke")
        if action.text == "hang":
            OVER.wait()
        if action.text == self.secret:
            return Seen(text="yes", reward=1.0, done=True)
        if self.steps >= 3:
            return Seen(text="too late", reward=0.0, done=True, metadata={"truncated": True})
        return Seen(text=f"not {action.text[:20]}", reward=0.0)

    @property
    def state(self):
        return State()

    def list_splits(self):
        return ["train", "test"]

    def list_tasks(self, split):
        return [self.get_task(split, index) for index in range(self.num_tasks(split))]

    def num_tasks(self, split):
        return 5 if split == "train" else 2

    def get_task(self, split, index):
        return {"id": f"{split}-{index}", "index": index}

    def get_task_range(self, split, start=None, stop=None):
        return self.list_tasks(split)[start:stop]


class MoveEnvironment(Environment):
    """Come to 3, 4 by adding; no reward is ever given."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.at = [0, 0]
        return Spot(at=self.at)

    def step(self, action, timeout_s=None, **kwargs):
        self.at = [self.at[0] + action.x, self.at[1] + action.y]
        return Spot(at=self.at, done=self.at == [3, 4])

    @property
    def state(self):
        return State()


APP = FastAPI()
for name, parts in {"guess": (GuessEnvironment, Guess, Seen), "move": (MoveEnvironment, Move, Spot)}.items():
    APP.mount(f"/{name}", create_fastapi_app(*parts, max_concurrent_envs=64, env_name="world"))
