"""Lets torchvision be imported beside a torch for CPUs: its wheel's operators are built for CUDA and cannot be loaded,
and its import fails over these two, of which it registers shapes. Nothing calls them. On PYTHONPATH, as vLLM looks at
its models' classes in processes of its own."""

import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
