"""Generated documentation pages. No part of a run."""
