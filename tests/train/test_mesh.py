"""Groups of the ranks of a trainer."""

from gang import GROUP_TIMEOUT_S
from mesh_cases import timeouts


def test_every_group_waits_as_long_as_the_process_group(pair):
    assert pair(timeouts) == [{GROUP_TIMEOUT_S}] * 2
