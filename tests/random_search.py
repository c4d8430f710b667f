"""How long property tests search: `make test` tries the same few examples every time, `make test-slow` new ones, ten
times as many. A failure found there prints the lines that repeat it."""

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("search", max_examples=1000, database=None, deadline=None, print_blob=True)
settings.load_profile("fixed")


def examples(count: int, **more: object) -> settings:
    """Settings of a test that tries `count` examples in `make test`, and more where the profile searches for longer."""
    return settings(max_examples=count * settings.default.max_examples // 100, **more)
