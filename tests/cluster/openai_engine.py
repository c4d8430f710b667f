"""An engine in one file: a client of an OpenAI-compatible server that returns token ids and logprobs.

Registered by one entry point of the group `hone.rollout.engine`, `openai = openai_engine:ENGINE`. New weights go to the
server as a safetensors file, by the route that SGLang has for it.
"""

import asyncio
import tempfile
from pathlib import Path

import httpx

from hone.config.engine import EngineKind
from hone.config.section import Section, key
from hone.errors import EngineError


class OpenAISettings(Section):
    """`cluster.engines.args`."""

    url: str = key(...)
    """Of the server."""


async def start(context):
    """See `EngineKind.start`."""
    config = context.loaded.config
    settings = OpenAISettings.model_validate(config.cluster.engines.args)
    return OpenAIEngine(settings.url, context.tokenizer.decode, timeout_s=config.rollout.timeout_s)


ENGINE = EngineKind("openai_engine:start", args=OpenAISettings, memory="none")


class OpenAIEngine:
    """Implements `hone.rollout.engine.Engine`."""

    def __init__(self, url, decode, *, timeout_s):
        self.version = 0
        self._client, self._decode = httpx.AsyncClient(base_url=url, timeout=timeout_s, trust_env=False), decode
        self._fingerprint = ""

    async def generate(self, request, on_sample=None):
        from hone.rollout.sampling import request_key, sample_seed
        from hone.types import Sample, VersionSpan

        sampling, root = request.sampling, request_key(request.seed, request.stream, request.prompt.index)
        samples = []
        for index in range(request.first_sample, request.first_sample + request.num_samples):
            body = {
                "prompt": request.prompt.token_ids.tolist(),
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "stop": list(sampling.stop),
                "stop_token_ids": list(sampling.stop_token_ids),
                "include_stop_str_in_output": True,
                "seed": sample_seed(root, index, request.first_position),
                "logprobs": 0,
                "return_token_ids": True,
            }
            choice = (await self._post("/v1/completions", body))["choices"][0]
            ids = tuple(choice["token_ids"])
            samples.append(
                Sample(
                    prompt_id=request.prompt.id,
                    index=index,
                    token_ids=ids,
                    sampler_logprobs=tuple(choice["logprobs"]["token_logprobs"]),
                    versions=(VersionSpan(self.version, len(ids)),),
                    finish_reason=choice["finish_reason"],
                    text=self._decode(ids),
                )
            )
            if on_sample:
                on_sample(samples[-1])
        return tuple(samples)

    async def load(self, weights, version):
        from safetensors.torch import save_file

        from hone.model.fingerprint import weights_fingerprint

        held = await asyncio.to_thread(lambda: {name: weight.detach().cpu().clone() for name, weight in weights})
        with tempfile.TemporaryDirectory() as folder:
            save_file(held, Path(folder) / "model.safetensors")
            await self._post("/update_weights_from_disk", {"model_path": folder, "weight_version": str(version)})
        self.version, self._fingerprint = version, weights_fingerprint(held.items())

    async def sleep(self):
        """The server has devices of its own."""

    async def wake(self):
        """As `sleep`."""

    async def close(self):
        await self._client.aclose()

    def fingerprint(self):
        return self._fingerprint

    async def _post(self, path, body):
        try:
            reply = await self._client.post(path, json=body)
            reply.raise_for_status()
        except httpx.HTTPError as error:
            raise EngineError(f"{error!r} from {self._client.base_url}{path}") from error
        return reply.json()
