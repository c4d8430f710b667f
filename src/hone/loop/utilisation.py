"""How much of the training devices' peak an update's passes reach (model FLOPs utilisation, MFU)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hone.config.run import RunConfig
from hone.config.topology import Topology
from hone.errors import DataError
from hone.plan.architecture import Architecture
from hone.plan.families import architecture_from
from hone.plan.hardware import known_gpu
from hone.plan.known_models import policy_config
from hone.plan.time import forward_flops
from hone.types import Batch


@dataclass(frozen=True, slots=True)
class Utilisation:
    """FLOPs of an update, relative to its devices' peak in that time.

    Counted are a forward pass and a backward one, twice as large, over each prompt once and over its responses, as in
    arXiv:2204.02311, appendix B. What activation checkpointing computes again is not.
    """

    architecture: Architecture
    peak_flops: float
    """Operations per second of all devices that train, by their data sheets."""

    @classmethod
    def here(cls, config: RunConfig, topology: Topology, device: torch.device, folder: Path) -> Utilisation | None:
        """Utilisation of a run's policy on this machine's GPUs; None where their peak or the model's family is not
        known, or where a critic learns in the same call.

        Args:
            folder: where relative paths of the run file start.
        """
        gpu = None if device.type == "cpu" or topology.critic else known_gpu()
        if gpu is None:
            return None
        try:
            architecture = architecture_from(policy_config(config.model, folder))
        except DataError:
            return None
        bytes_each = 2 if config.run.precision == "bfloat16" else 4
        return cls(architecture, len(topology.trainer.devices) * gpu.flops(bytes_each))

    def reached(self, batch: Batch, trained_tokens: float, seconds: float) -> float:
        """Share of the peak, for an update that took `seconds` seconds.

        Args:
            trained_tokens: with a loss, in all passes over the batch: samples without advantage cost none.
        """
        prompt_N = np.array([len(prompt) for prompt in batch.prompts], np.float64)
        response_S = batch.length_S.cpu().numpy().astype(np.float64)
        before_S = prompt_N[batch.prompt_S.cpu().numpy()]
        tokens = prompt_N.sum() + response_S.sum()
        contexts = (prompt_N * (prompt_N + 1) / 2).sum() + (response_S * (before_S + (response_S + 1) / 2)).sum()
        flops = 3 * forward_flops(self.architecture, tokens, contexts / tokens, logit_tokens=response_S.sum())
        passes = trained_tokens / float(batch.loss_mask_T.sum())
        return float(passes * flops / (self.peak_flops * seconds))
