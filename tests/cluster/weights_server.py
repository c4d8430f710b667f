"""`hone serve policy` with one more route, by which new weights come from a file; a program of its own."""

import asyncio
import sys
from pathlib import Path

from pydantic import BaseModel
from safetensors.torch import load_file

from hone.assemble.policy_server import PolicySettings, loader
from hone.serve.http import BearerTokens, HttpSettings, Lifecycle
from hone.serve.policy import PolicyService
from hone.serve.policy_app import policy_app
from hone.serve.running import serve


class NewWeights(BaseModel):
    model_path: str
    weight_version: str


async def main(folder):
    settings, lifecycle = HttpSettings(port=0), Lifecycle()
    service = PolicyService(loader(folder, 0, "policy", PolicySettings(threads=1)))
    app = policy_app(service, lifecycle, settings, BearerTokens(settings))

    @app.post("/update_weights_from_disk")
    async def update(new: NewWeights):
        weights = load_file(Path(new.model_path) / "model.safetensors")
        await service.policy.engine.load(weights.items(), int(new.weight_version))
        return {"success": True}

    await serve(app, service, lifecycle, settings, name="policy")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
