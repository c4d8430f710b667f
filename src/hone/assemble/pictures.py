"""What the report draws of responses: posters, where the run file rewards them. Nothing else is a picture."""

from __future__ import annotations

from hone.config.run import RunConfig
from hone.observe.recorder import RecordedSample
from hone.observe.report import Picture
from hone.reward.poster import render_png
from hone.reward.poster.parse import BadGroundTruth

PICTURE_PX = 320
"""Longer side."""


def picture_of_responses(config: RunConfig) -> Picture | None:
    """A function that draws a recorded response; None for a run that has nothing to draw."""
    args = next((component.args for component in config.reward.components if component.use == "poster"), None)
    if args is None:
        return None
    geometry = args.get("geometry", "xywh")

    def draw(recorded: RecordedSample) -> bytes | None:
        try:
            return render_png(recorded.sample.text, recorded.answer, picture_px=PICTURE_PX, geometry=geometry)
        except BadGroundTruth:  # a row that was never scored, either
            return None

    return draw
