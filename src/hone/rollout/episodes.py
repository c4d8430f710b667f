"""Multi-turn episodes as samples: turns from an engine, observations from environments.

`EpisodeEngine` is itself an `engine.Engine`, so that the loop and the evaluation know nothing of turns. Token in, token
out: what was sampled is never tokenised again; only the environment's own text becomes tokens, which carry no loss.

The first turn is one request for all samples of a prompt, which is computed once. After it every sample continues by
itself, and computes its prompt and everything since anew: no cache is kept between turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hone.errors import DataError
from hone.experts import RoutingRecord, joined_experts, unrecorded
from hone.rollout.engine import Engine, OnSample, Request
from hone.rollout.env import Episode, episode_seed
from hone.rollout.env_pool import EnvironmentFault, EnvironmentPool, EpisodeHandle
from hone.runtime.processes import together
from hone.runtime.user_code import describe
from hone.types import FinishReason, Sample, TokenIds, Turn, VersionSpan

if TYPE_CHECKING:
    from torch import Tensor


class EpisodeEngine:
    """`engine.Engine` whose samples meet an environment after each turn.

    Args:
        engine: samples the turns.
        environments: started; closed with this engine.
        encode: the text of an observation to tokens, nothing added. Raises DataError for what it cannot spell.
        max_turns: turns of a sample, at most.
        in_step: every sample in play takes its next turn at the same time, as soon as the last environment has
            answered. What is decoded together, and so every last bit, is then the same in each run; without it a
            group never waits for another.
    """

    def __init__(
        self,
        engine: Engine,
        environments: EnvironmentPool,
        *,
        encode: Callable[[str], Sequence[int]],
        max_turns: int,
        in_step: bool,
    ) -> None:
        self._engine, self._environments, self._encode, self._max_turns = engine, environments, encode, max_turns
        self._barrier = TurnBarrier(in_step)

    @property
    def version(self) -> int:
        """See `Engine.version`."""
        return self._engine.version

    async def generate(self, request: Request, on_sample: OnSample | None = None) -> tuple[Sample, ...]:
        """See `Engine.generate`. `request.sampling.max_tokens` bounds a whole sample, tool tokens included."""
        with self._barrier.playing():
            first = await self._engine.generate(request)
            builders = list[SampleBuilder]()
            for sample in first:
                seed = episode_seed(request.seed, request.stream, request.prompt.index, sample.index)
                environment = self._environments.open(Episode(request.prompt, sample.index, seed))
                builders.append(SampleBuilder(request, sample, environment, self._encode))
            try:
                await self._play(request, builders, on_sample)
            finally:
                for builder in builders:
                    builder.environment.close()
            return tuple(builder.sample() for builder in builders)

    async def load(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """See `Engine.load`."""
        await self._engine.load(weights, version)

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        await self._engine.sleep()

    async def wake(self) -> None:
        """See `Engine.wake`."""
        await self._engine.wake()

    async def close(self) -> None:
        """See `Engine.close`."""
        try:
            await self._engine.close()
        finally:
            await self._environments.close()

    def memory_metrics(self) -> dict[str, float]:
        """Memory of the environments' process."""
        return self._environments.memory_metrics()

    def fingerprint(self) -> str:
        """See `Engine.fingerprint`."""
        return self._engine.fingerprint()

    async def _play(self, request: Request, builders: Sequence[SampleBuilder], on_sample: OnSample | None) -> None:
        """Turn by turn, until every sample has ended."""

        async def answer(builder: SampleBuilder, is_last: bool) -> bool:
            continues = await builder.answer(is_last=is_last)
            if not continues and on_sample is not None:
                on_sample(builder.sample())
            return continues

        playing = builders
        for turn in range(1, self._max_turns + 1):
            continues = await together(answer(builder, turn == self._max_turns) for builder in playing)
            playing = [builder for builder, on in zip(playing, continues, strict=True) if on]
            if not playing:
                return
            await self._barrier.next((request.stream, request.prompt.index, request.num_samples))
            turns = await together(self._engine.generate(builder.next_request()) for builder in playing)
            for builder, (sampled,) in zip(playing, turns, strict=True):
                builder.append_turn(sampled)


class SampleBuilder:
    """A sample in the making."""

    def __init__(
        self, request: Request, first_turn: Sample, environment: EpisodeHandle, encode: Callable[[str], Sequence[int]]
    ) -> None:
        self.environment = environment
        self._request, self._encode = request, encode
        self._index = first_turn.index
        self._token_ids = np.empty(0, np.int32)
        self._logprobs = np.empty(0, np.float32)
        self._versions: list[VersionSpan] = []
        self._written = np.empty(0, np.bool_)
        self._texts: list[str] = []
        self._turns: list[Turn] = []
        self._finish_reason: FinishReason = "stop"
        self._fault = ""
        self._routing: RoutingRecord | None = None
        self._prompt_routing: RoutingRecord | None = None
        self.append_turn(first_turn)

    def append_turn(self, sampled: Sample) -> None:
        """What the policy wrote."""
        start = len(self._token_ids)
        self._append(sampled.token_ids, sampled.sampler_logprobs, sampled.versions, written=True)
        self._append_routing(sampled)
        self._texts.append(sampled.text)
        self._turns.append(Turn(start, len(self._token_ids)))
        self._finish_reason, self._engine = sampled.finish_reason, sampled.engine

    def _append_routing(self, sampled: Sample) -> None:
        """Keep what tokens were drawn with; of those that the engine had not computed yet (what the environment said,
        and the token before it) take what it computed now."""
        if sampled.routing is None:
            return
        before = len(self._token_ids) - len(sampled.token_ids)
        if self._routing is None:
            self._routing, self._prompt_routing = sampled.routing, sampled.prompt_routing
            return
        drawn = self._routing[: self._num_routed]
        if (again := sampled.prompt_routing) is None:
            missed = unrecorded(before - len(drawn), drawn)
        else:
            missed = again[len(self._request.prompt.token_ids) + len(drawn) :]
        self._routing = joined_experts([drawn, missed, sampled.routing])

    @property
    def _num_routed(self) -> int:
        """Tokens whose routing is known: not the last one of a turn, which was no input yet."""
        return 0 if self._routing is None else max(len(self._routing) - 1, 0)

    async def answer(self, *, is_last: bool) -> bool:
        """Ask the environment about the newest turn, and append what it says. Returns whether another turn follows."""
        try:
            said = await self.environment.step(self._texts[-1])
            self._turns[-1] = replace(self._turns[-1], reward=said.reward, metrics=said.metrics)
            if is_last or said.text is None:
                return False
            token_ids = self._encode(said.text)
            count = len(token_ids)
            if len(self._token_ids) + count >= self._request.sampling.max_tokens:  # no room for the policy after it
                self._finish_reason = "length"
                return False
            versions = (VersionSpan(self._versions[-1].version, count),)
            self._append(np.array(token_ids, np.int32), np.zeros(count, np.float32), versions, written=False)
            self._texts.append(said.text)
            return True
        except EnvironmentFault as fault:
            self._fault = str(fault)
        except DataError as error:
            self._fault = f"gave a text without tokens: {describe(error)}"
        return False

    def next_request(self) -> Request:
        """The sample's next turn: everything so far is its prompt, randomness continues where it was."""
        request, count = self._request, len(self._token_ids)
        return replace(
            request,
            prompt=replace(request.prompt, token_ids=np.concatenate([request.prompt.token_ids, self._token_ids])),
            num_samples=1,
            sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - count),
            first_sample=self._index,
            first_position=count,
            num_routed=0 if self._routing is None else len(request.prompt.token_ids) + self._num_routed,
        )

    def sample(self) -> Sample:
        routing = self._routing
        if routing is not None:
            routing = joined_experts([routing, unrecorded(len(self._token_ids) - len(routing), routing)])
        return Sample(
            prompt_id=self._request.prompt.id,
            index=self._index,
            token_ids=self._token_ids,
            sampler_logprobs=self._logprobs,
            versions=tuple(self._versions),
            finish_reason=self._finish_reason,
            text="".join(self._texts),
            loss_mask=self._written,
            turns=tuple(self._turns),
            fault=self._fault,
            engine=self._engine,
            routing=routing,
            prompt_routing=self._prompt_routing,
        )

    def _append(
        self, token_ids: TokenIds, logprobs: NDArray[np.float32], versions: Sequence[VersionSpan], *, written: bool
    ) -> None:
        self._token_ids = np.concatenate([self._token_ids, token_ids])
        self._logprobs = np.concatenate([self._logprobs, logprobs])
        self._written = np.concatenate([self._written, np.full(len(token_ids), written)])
        for version, count in versions:
            if self._versions and self._versions[-1].version == version:
                count += self._versions.pop().num_tokens
            self._versions.append(VersionSpan(version, count))


class TurnBarrier:
    """Lets groups take their turns together: a caller of `next` is woken when every group in play waits there.

    A group that is done, has failed or is cancelled plays no more, so no other group waits for it.
    """

    def __init__(self, in_step: bool) -> None:
        self._in_step = in_step
        self._num_playing = 0
        self._waiting: list[tuple[tuple[str, int, int], asyncio.Future[None]]] = []

    @contextmanager
    def playing(self) -> Iterator[None]:
        """For as long as a group plays."""
        self._num_playing += 1
        try:
            yield
        finally:
            self._num_playing -= 1
            self._wake_if_all_wait()

    async def next(self, order: tuple[str, int, int]) -> None:
        """Wait for the others. All wake in one pass of the event loop, by `order` and not first come, first served."""
        if not self._in_step:
            return
        entry = (order, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._wake_if_all_wait()
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            raise

    def _wake_if_all_wait(self) -> None:
        if len(self._waiting) == self._num_playing:
            waiting, self._waiting = self._waiting, []
            for _, woken in sorted(waiting, key=lambda entry: entry[0]):
                if not woken.done():
                    woken.set_result(None)
