"""Servers of openenv: a game whose actions are numbers, and one whose actions are calls of tools."""

from __future__ import annotations

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State(episode_id="game", step_count=0)

    def reset(self, seed=None, episode_id=None, **options):
        self.secret = (seed or 0) % 10
        return Hint(text=options.get("text", "Guess a digit."), done=False, reward=0.0)

    def step(self, action, **options):
        is_right = action.number == self.secret
        text = "yes" if is_right else "more" if self.secret > action.number else "less"
        return Hint(text=text, done=is_right, reward=float(is_right))


class Shop(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State(episode_id="shop", step_count=0)

    def __init__(self):
        tools = FastMCP("shop")

        @tools.tool
        def price(item: str) -> int:
            """The price of an item."""
            return len(item)

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **options):
        return Observation(done=False, reward=0.0, metadata={})

    def _step_impl(self, action, **options):
        return Observation(done=True, reward=0.0)

    def step(self, action, **options):
        return self._paid(super().step(action, **options))

    async def step_async(self, action, **options):
        return self._paid(await super().step_async(action, **options))

    def _paid(self, seen):
        if isinstance(seen, CallToolObservation):
            seen.reward = 0.5
        return seen


game = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=8)
shop = create_fastapi_app(Shop, CallToolAction, CallToolObservation, max_concurrent_envs=8)
